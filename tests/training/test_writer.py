"""Writing checkpoints beside training: what is copied, who waits, and what a failed write leaves."""

import errno
import io
import os
import threading
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fla_train.training import checkpoint, writer
from fla_train.training.checkpoint import TrainState
from fla_train.training.writer import CheckpointWriter, HostCopy, Written


@pytest.fixture(autouse=True)
def alone(tmp_path: Path):
    """A process group of this process only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Engine:
    """Saves as DeepSpeed does: through its checkpoint engine, at a path it makes up."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.checkpoint_engine = SimpleNamespace()
        self.weight = torch.zeros(1000)
        self.group = {"lr": 0.1}

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        content = {"module": OrderedDict(weight=self.weight), "groups": [self.group]}
        self.checkpoint_engine.save(content, f"{folder}/{tag}/model.pt")


def load(path: Path) -> dict:
    assert checkpoint.find_fault(path) is None
    return torch.load(path / "deepspeed" / "model.pt", weights_only=False)


@pytest.fixture
def told() -> list[Written]:
    return []


def make(folder: Path, told: list[Written], keep: int = 2, keep_every: int = 0) -> CheckpointWriter:
    return CheckpointWriter(folder, keep=keep, keep_every=keep_every, tell=told.append)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_training_goes_on_while_the_copy_of_the_moment_is_written(
    tmp_path: Path, told: list[Written], monkeypatch: pytest.MonkeyPatch
):
    may_write, save = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *a: (may_write.wait(30), save(*a)))
    engine, state = Engine(), TrainState(step=7, tokens=70)
    write = make(tmp_path / "checkpoints", told)
    assert write.save(engine, state) < 5  # returns although nothing can be written yet
    usual = engine.checkpoint_engine
    engine.weight.add_(1.0)
    engine.group["lr"] = 0.2
    state.step = 8
    assert not checkpoint.checkpoints(tmp_path / "checkpoints") and not told
    may_write.set()
    (path, fault) = (write.wait().path, write.wait().fault)
    assert (path.name, fault) == ("step-0000007", None) and told == [write.wait()]
    content = load(path)
    assert content["module"]["weight"].eq(0).all() and content["groups"] == [{"lr": 0.1}]
    assert checkpoint.read_state(path) == TrainState(step=7, tokens=70)
    assert engine.checkpoint_engine is usual

    write.save(engine, state)  # the same buffers, with the content of now
    assert load(write.wait().path)["module"]["weight"].eq(1).all()
    assert load(path)["module"]["weight"].eq(0).all()


@pytest.mark.parametrize("moment", ["files", "manifest", "rename"])
def test_a_full_disk_costs_one_checkpoint_only(
    tmp_path: Path, told: list[Written], monkeypatch: pytest.MonkeyPatch, moment: str
):
    engine, write = Engine(), make(tmp_path / "checkpoints", told)
    write.save(engine, TrainState(step=1))
    assert write.wait().fault is None
    before = names(tmp_path / "checkpoints")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        place = {"files": (torch, "save"), "manifest": (checkpoint, "write_json"), "rename": (os, "rename")}
        patch.setattr(*place[moment], full)
        write.save(engine, TrainState(step=2))
        assert write.wait().fault == "rank 0: No space left on device"
    assert told[-1].fault is not None
    assert names(tmp_path / "checkpoints") == before
    write.save(engine, TrainState(step=3))
    assert write.wait().fault is None
    assert checkpoint.choose("auto", tmp_path / "checkpoints").name == "step-0000003"


def test_a_fault_that_is_not_the_disks_is_raised(
    tmp_path: Path, told: list[Written], monkeypatch: pytest.MonkeyPatch
):
    def broken(*arguments: object) -> None:
        raise TypeError("cannot pickle")

    monkeypatch.setattr(torch, "save", broken)
    write = make(tmp_path / "checkpoints", told)
    write.save(Engine(), TrainState(step=1))
    with pytest.raises(TypeError, match="cannot pickle"):
        write.wait()
    assert not told


def test_some_are_kept_for_good_and_the_others_roll(tmp_path: Path, told: list[Written]):
    engine, write = Engine(), make(tmp_path / "checkpoints", told, keep=2, keep_every=4)
    for step in range(1, 10):
        write.save(engine, TrainState(step=step))
    write.wait()
    kept = [int(name.removeprefix("step-")) for name in names(tmp_path / "checkpoints")]
    assert kept == [4, 8, 9]
    write.save(engine, TrainState(step=10))
    write.wait()
    assert names(tmp_path / "checkpoints")[-1] == "step-0000010" and len(names(tmp_path / "checkpoints")) == 4


def test_an_old_one_that_cannot_be_deleted_is_no_fault_of_the_new_one(
    tmp_path: Path, told: list[Written], monkeypatch: pytest.MonkeyPatch
):
    engine, write = Engine(), make(tmp_path / "checkpoints", told, keep=1)
    write.save(engine, TrainState(step=1))
    write.wait()

    rmdir = os.rmdir

    def busy(path: object, **options: object) -> None:
        if checkpoint.DELETING in str(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        rmdir(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", busy)
        write.save(engine, TrainState(step=2))
        assert write.wait().fault is None
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "checkpoints")] == ["step-0000002"]
    checkpoint.clean(tmp_path / "checkpoints")
    assert names(tmp_path / "checkpoints") == ["step-0000002"]


def test_host_copies_share_memory_where_the_originals_do(tmp_path: Path):
    flat = torch.arange(6.0)
    content = {"tied": [flat[:4], flat[:4]], "other": flat[2:], "number": 3, "empty": torch.empty(0)}
    host = HostCopy()
    with host.copying():
        copy = host.copy(content)
    assert copy["tied"][0] is copy["tied"][1]
    assert copy["tied"][0].data_ptr() != flat.data_ptr()
    assert torch.equal(copy["other"], flat[2:]) and copy["number"] == 3
    torch.save(copy, tmp_path / "copy.pt")
    assert len({t.data_ptr() for t in torch.load(tmp_path / "copy.pt")["tied"]}) == 1

    flat.add_(1.0)
    with host.copying():
        again = host.copy(content)
    assert again["other"].data_ptr() == copy["other"].data_ptr()
    assert torch.equal(again["other"], flat[2:])


def test_the_thread_does_not_outlive_a_wait(tmp_path: Path, told: list[Written]):
    write = make(tmp_path / "checkpoints", told)
    assert write.wait() is None
    write.save(Engine(), TrainState(step=1))
    write.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
    assert writer.WRITING not in "".join(names(tmp_path / "checkpoints"))


def test_the_reason_is_the_disks_and_not_what_torch_makes_of_it():
    class Full(io.RawIOBase):
        room = 1  # writes

        def writable(self) -> bool:
            return True

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room -= 1
            return len(data)

    with pytest.raises(RuntimeError, match="unexpected pos") as failure:
        torch.save(torch.zeros(1000), Full())
    assert writer.reason(failure.value) == "No space left on device"
    assert writer.reason(RuntimeError("two\n lines")) == "two lines"
