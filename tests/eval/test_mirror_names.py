"""Names of data sets lead nowhere but into the mirror."""

import json
from pathlib import Path

import datasets
import pytest

from fla_train.eval.mirror import DatasetUnavailable, hub_datasets, mirror_place


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mirror beside a folder of rows that is none of its own, which a name could lead to."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/test.jsonl").write_text(json.dumps({"text": "secret"}) + "\n")
    monkeypatch.chdir("/")  # where the names are no paths
    (tmp_path / "mirror").mkdir()
    return tmp_path / "mirror"


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "a/..", "/absent", "a//b", "a/b/c"])
def test_a_name_that_leads_out_of_the_mirror_is_refused(mirror: Path, name: str) -> None:
    with hub_datasets(mirror), pytest.raises(DatasetUnavailable, match=r"must be of the form org/name"):
        datasets.load_dataset(name, split="test")
    with pytest.raises(ValueError, match=r"must be of the form org/name"):
        mirror_place(mirror, name)


@pytest.mark.parametrize("config", ["..", ".", "../../outside", "/outside"])
def test_so_is_a_config(mirror: Path, config: str) -> None:
    with pytest.raises(ValueError, match="is no config of org/name"):
        mirror_place(mirror, "org/name", config)
    assert mirror_place(mirror, "org/name", "rc.wikipedia") == mirror / "org/name/rc.wikipedia"
