"""Machines of one run, or runs of a sweep, that make the folder of a stream or a mixture at the same time."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from fla_train.data.config import DataConfig, PartConfig
from fla_train.utils import filesystem
from tests.data.conftest import quiet


def mixture_of(local: DataConfig) -> DataConfig:
    part = PartConfig(weight=1.0, path=local.path)
    return replace(local, source="mixture", path=None, mixture={"web": part})


@pytest.mark.parametrize("kind", ["stream", "mixture"])
def test_all_find_the_folder_whole(local, monkeypatch, kind):
    config = replace(local, stream=True) if kind == "stream" else mixture_of(local)
    folder = quiet(config).folder
    shutil.rmtree(folder)  # what it is made of stays: all come to make it at the same moment
    sync = filesystem.sync

    def slow_disk(path):
        time.sleep(0.02)
        sync(path)

    monkeypatch.setattr(filesystem, "sync", slow_disk)
    with ThreadPoolExecutor(4) as machines:
        found = list(machines.map(quiet, [config] * 4))
    assert [prepared.folder for prepared in found] == [folder] * 4
    assert quiet(config).tokenizer().eos_token_id is not None
    assert not list(folder.parent.glob(".*/")) and not list(folder.glob("*.tmp"))
