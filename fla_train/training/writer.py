"""Writes checkpoints beside training: a copy to host memory, then a thread that saves, checksums and renames.

Training stands still only for the copy (and for a write of the one before that has not ended). The threads of
all ranks meet in a process group of their own, so that rank 0 renames the folder only when every rank's files
are on disk. A write that fails (disk full) is reported and leaves the earlier checkpoints as they were.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from torch import Tensor

from fla_train.training import checkpoint
from fla_train.training.checkpoint import DEEPSPEED_TAG, STATE, WRITING, TrainState, folder_name
from fla_train.training.deepspeed_patches import files_through
from fla_train.utils.filesystem import describe, sync

TIMEOUT = timedelta(hours=2)  # for the slowest rank's files


@dataclass(frozen=True)
class Written:
    """How a write ended, equal on all ranks."""

    path: Path
    seconds: float
    fault: str | None  # why there is no checkpoint at `path`


class HostCopy:
    """Copies nested containers of tensors to host memory, into the same buffers each time.

    Tensors that are views of one memory, such as tied weights, stay one.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._used = 0
        # The source stays with its copy: freed, another tensor could take its place in memory.
        self._copied: dict[tuple, tuple[Tensor, Tensor]] = {}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Inside, `copy` overwrites the copies made before; afterwards the new ones are complete."""
        self._used = 0
        yield
        if any(source.is_cuda for source, _ in self._copied.values()):
            torch.cuda.synchronize()
        self._copied.clear()

    def copy(self, content: object) -> object:
        """`content` with fresh containers and host tensors."""
        if isinstance(content, Tensor):
            return self._tensor(content)
        if isinstance(content, dict):
            return type(content)((key, self.copy(value)) for key, value in content.items())
        if type(content) in (list, tuple):
            return type(content)(self.copy(value) for value in content)
        return content  # numbers, strings, and layouts that never change

    def _tensor(self, tensor: Tensor) -> Tensor:
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() and key in self._copied:
            return self._copied[key][1]
        if self._used == len(self._buffers):
            self._buffers.append(tensor.new_empty(0, device="cpu"))
        buffer = self._buffers[self._used]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.device.type == "cuda"
            )
            self._buffers[self._used] = buffer
        self._used += 1
        self._copied[key] = (tensor, buffer.copy_(tensor.detach(), non_blocking=True))
        return buffer


class Capture(CheckpointEngine):
    """Takes what DeepSpeed would save: host copies by file name."""

    def __init__(self, host: HostCopy):
        super().__init__()
        self.files: dict[str, object] = {}
        self._host = host

    def create(self, info: object) -> None:
        self.files = {}

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """None is needed."""

    def save(self, state_dict: dict, path: str) -> None:
        self.files[f"{DEEPSPEED_TAG}/{Path(path).name}"] = self._host.copy(state_dict)

    def load(self, path: str, map_location: object = None) -> dict:
        raise NotImplementedError("only saves")

    def commit(self, info: object) -> bool:
        return True


class CheckpointWriter:
    """Writes one checkpoint at a time. All ranks make one and call its methods alike.

    Args:
        folder: holds the checkpoints.
        keep: newest ones kept, 0: all.
        keep_every: steps whose multiples are kept for good, 0: none.
        tell: called on rank 0, from the thread, when a write has ended.
    """

    def __init__(self, folder: Path, *, keep: int, keep_every: int, tell: Callable[[Written], None]):
        self._folder, self._keep, self._keep_every, self._tell = folder, keep, keep_every, tell
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._host = HostCopy()
        self._thread: threading.Thread | None = None
        self._result: Written | None = None
        self._error: Exception | None = None

    def save(self, engine, state: TrainState) -> float:
        """Have `folder/step-XXXXXXX` written from all ranks; returns the seconds training stood still."""
        begin = time.perf_counter()
        self.wait()
        files = self._capture(engine)
        arguments = (files, replace(state))
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()
        return time.perf_counter() - begin

    def wait(self) -> Written | None:
        """Wait for the write under way; how the last one ended, None before the first."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise self._error
        return self._result

    def _capture(self, engine) -> dict[str, object]:
        """This rank's files, name to content, in host memory."""
        capture = Capture(self._host)
        with self._host.copying(), files_through(engine, capture):
            engine.save_checkpoint("nowhere", tag=DEEPSPEED_TAG, save_latest=False)
        return capture.files | {f"rng-{dist.get_rank()}.pt": checkpoint.random_states()}

    def _run(self, files: dict[str, object], state: TrainState) -> None:
        begin = time.perf_counter()
        final = self._folder / folder_name(state.step)
        writing = self._folder / (WRITING + final.name)
        try:
            fault = self._write(files, state, writing, final)
        except Exception as failure:  # another rank is gone, or a fault of ours: `wait` raises it
            self._error = failure
            return
        self._result = Written(final, time.perf_counter() - begin, fault)
        if dist.get_rank() == 0:
            self._tell(self._result)

    def _write(
        self, own_files: dict[str, object], state: TrainState, writing: Path, final: Path
    ) -> str | None:
        """Write, and agree with the other ranks on the first fault, if there is one."""
        first = dist.get_rank() == 0
        if fault := self._agree(_attempt(partial(_make_empty, writing)) if first else None):
            return fault
        entries: dict[str, dict] = {}
        own = _attempt(lambda: entries.update(_write_files(writing, own_files)))
        everyone: list[dict] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, entries, group=self._group)
        fault = self._agree(own)
        if fault is None:
            files = {name: entry for part in everyone for name, entry in part.items()}
            finish = partial(self._finish, files, state, writing, final)
            fault = self._agree(_attempt(finish) if first else None)
        if fault is not None and first:
            shutil.rmtree(writing, ignore_errors=True)
        return fault

    def _finish(self, files: dict[str, dict], state: TrainState, writing: Path, final: Path) -> None:
        """Rank 0: manifest, rename, retention."""
        files |= _write_text(writing, STATE, asdict(state))
        checkpoint.write_manifest(writing, state, files)
        checkpoint.remove(final)  # the remains of a corrupt one of the same step
        os.rename(writing, final)
        sync(self._folder)
        checkpoint.prune(final, self._keep, self._keep_every)

    def _agree(self, fault: str | None) -> str | None:
        """The first rank's fault that there is, on all ranks."""
        everyone: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, fault, group=self._group)
        return next((f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text is not None), None)


def _attempt(work: Callable[[], None]) -> str | None:
    """Why `work` failed for want of the file system, or None. torch reports a full disk as a RuntimeError."""
    try:
        work()
    except (OSError, RuntimeError) as failure:
        return reason(failure)
    return None


def reason(failure: BaseException) -> str:
    """The system's word for it, behind whatever torch made of it while it closed its file."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return " ".join(str(failure).split())


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    (folder / DEEPSPEED_TAG).mkdir(parents=True)


def _write_files(folder: Path, files: dict[str, object]) -> dict[str, dict]:
    """Save this rank's files; their manifest entries."""
    entries = {}
    for name, content in files.items():
        with (folder / name).open("wb") as file:
            torch.save(content, file)
        sync(folder / name)
        entries[name] = describe(folder / name)
    return entries


def _write_text(folder: Path, name: str, content: dict) -> dict[str, dict]:
    checkpoint.write_json(folder / name, content)
    return {name: describe(folder / name)}
