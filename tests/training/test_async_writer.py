"""The async writer's process: several ranks' writers on one folder, failed writes, the end of its trainer."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from fla_train.training import async_writer, checkpoint
from fla_train.training.async_writer import AsyncWriter, Save, WriteFailed

STATE = b'{"step": 3, "tokens": 30}'


def make_save(folder: Path, rank: int, world_size: int, attempt: str = ".writing-3") -> Save:
    """A save of which each file is the staging buffer's bytes 2 to 5, and the state on rank 0."""
    files = {checkpoint.rank_file(rank): [(True, 2, 3), (False, 0, 1)]}
    if rank == 0:
        files |= {"weights.pt": [(True, 2, 3)], "state.json": [(False, 1, len(STATE))]}
    content = {"step": 3, "world_size": world_size}
    return Save(folder, attempt, rank, files, content, keep=0, keep_every=0)


BESIDE = b"!" + STATE


@pytest.fixture
def staging() -> Iterator[int]:
    descriptor = os.memfd_create("staging")
    os.write(descriptor, b"01abc5")
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def writers(staging: int) -> Iterator[list[AsyncWriter]]:
    started = [AsyncWriter(staging, rank) for rank in range(3)]
    yield started
    for writer in started:
        writer.close()


def test_rank_0_completes_what_all_ranks_have_written(writers: list[AsyncWriter], tmp_path: Path):
    for rank in (0, 2, 1):
        assert not checkpoint.CheckpointStore(tmp_path).list()
        writers[rank].start(make_save(tmp_path, rank, 3), BESIDE)
    assert [writer.result().error for writer in writers] == [None] * 3
    (path,) = tmp_path.iterdir()
    assert checkpoint.find_error(path) is None and checkpoint.world_size(path) == 3
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert files == set(checkpoint.read_manifest(path)["files"]) | {"manifest.json"}
    assert (path / "rank-2.pt").read_bytes() == b"abc!"


def test_files_of_an_earlier_attempt_are_never_taken(writers: list[AsyncWriter], tmp_path: Path):
    writers[1].start(make_save(tmp_path, 1, 2, ".writing-3-earlier"), BESIDE)
    assert writers[1].result().error is None
    writers[0].start(make_save(tmp_path, 0, 2, ".writing-3-later"), BESIDE)
    writers[0].others_are_done("rank 1: was killed")
    assert writers[0].result().error == "rank 1: was killed"
    assert list(tmp_path.iterdir()) == []


def test_files_that_rank_0_never_sees(staging: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(async_writer, "VISIBLE", 0.1)
    trainer, end = Pipe()
    trainer.send(None)
    with pytest.raises(WriteFailed, match=r"^rank 1, 2: "):
        async_writer.write(make_save(tmp_path, 0, 3), staging, BESIDE, end)
    assert list(tmp_path.iterdir()) == []
    trainer.close()
    with pytest.raises(EOFError):
        async_writer.write(make_save(tmp_path, 0, 3), staging, BESIDE, end)


@pytest.mark.parametrize("moment", ["fsync", "write_manifest", "rename"])
def test_a_full_disk_at_any_moment_leaves_the_earlier_ones(staging, tmp_path, monkeypatch, moment):
    earlier = make_save(tmp_path, 0, 1)
    async_writer.write(earlier, staging, BESIDE, Pipe()[1])
    os.rename(tmp_path / "step-0000003", tmp_path / "step-0000001")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint if moment == "write_manifest" else os, moment, full)
    with pytest.raises(WriteFailed, match=r"^rank 0: No space left on device$"):
        async_writer.write(make_save(tmp_path, 0, 1), staging, BESIDE, Pipe()[1])
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000001"]


def test_the_run_folder_is_not_made_again_where_it_was(writers: list[AsyncWriter], tmp_path: Path):
    gone = tmp_path / "run/checkpoints"
    writers[0].start(make_save(gone, 0, 1), BESIDE)
    assert writers[0].result().error == "rank 0: No such file or directory"
    assert list(tmp_path.iterdir()) == []


def test_it_dies_with_its_trainer(staging: int):
    code = (
        "import os, time; from pathlib import Path;"
        "from fla_train.training.async_writer import AsyncWriter, Save;"
        "writer = AsyncWriter(os.memfd_create('staging'), 0);"
        "writer.start(Save(Path('/none'), 'none', 0, {}, {'step': 0}, 0, 0), b'');"
        "writer.result();"  # it is up
        "print(writer.process.pid, flush=True); time.sleep(100)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    writer = psutil.Process(int(trainer.stdout.readline()))
    writer.suspend()  # as if it hung in a write
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert psutil.wait_procs([writer], timeout=20)[1] == []


def test_it_starts_without_torch():
    code = "import sys, fla_train.training.async_writer; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
