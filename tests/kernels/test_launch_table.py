"""The table of launch options: the row for a call, and valid and invalid files of a user."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from fla_train.bench.tune import write_table
from fla_train.kernels.delta_product.triton.launch_table import (
    Key,
    LaunchOptions,
    as_table,
    fallback,
    lookup,
    nearest,
    option_error,
)
from fla_train.kernels.delta_product.triton.launches import ROWS

pytestmark = pytest.mark.usefixtures("launch_cache")
PLAIN = fallback()
MISCOMPILED = {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 3}  # where V = 192


def marked(number: int) -> LaunchOptions:
    """Options that can be told from others."""
    return replace(PLAIN, chunk_prepare_wy={"num_warps": 4, "maxnreg": number})


def test_the_nearest_row_that_is_not_beyond_serves():
    table = {Key("9.0", 64, v, n): marked(100 * v + n) for v in (64, 128) for n in (1, 3)}

    def found(key_dim: int, value_dim: int, num_householder: int) -> int:
        return nearest(table, Key("9.0", key_dim, value_dim, num_householder)).chunk_prepare_wy["maxnreg"]

    assert found(64, 64, 1) == 6401
    assert found(64, 128, 2) == 12801
    assert found(64, 128, 9) == 12803
    assert found(64, 320, 3) == 12803
    assert nearest(table, Key("9.0", 128, 64, 1)) is None
    assert nearest(table, Key("8.0", 64, 64, 1)) is None
    table = {Key("9.0", 64, 128, 1): replace(PLAIN, chunk_bwd_qkg=MISCOMPILED)}
    assert nearest(table, Key("9.0", 64, 128, 1)) is not None
    assert nearest(table, Key("9.0", 64, 192, 1)) is None


def test_what_ships_is_sound_and_serves_every_16_bit_head_up_to_128():
    table = as_table(ROWS)
    assert {key.architecture for key in table} == {"8.0", "9.0", "10.0"}
    for key, options in table.items():
        for kernel, given in asdict(options).items():
            assert option_error(kernel, given, key.value_dim) is None
    for key_dim in (16, 64, 96, 128):
        for value_dim in (16, 64, 128, 192, 256, 512):
            for num_householder in (1, 2, 3, 64):
                key = Key.of("9.0", key_dim, value_dim, num_householder)
                found = nearest(table, key)
                assert found.chunk_bwd_qkg["BKO"] == key.key_dim
                assert found.chunk_bwd_qkg["BV"] <= max(64, key.value_dim)
                assert option_error("chunk_bwd_qkg", found.chunk_bwd_qkg, key.value_dim) is None


def choose(architecture: str, key_dim: int, value_dim: int, num_householder: int) -> LaunchOptions:
    return lookup(torch.bfloat16, Key.of(architecture, key_dim, value_dim, num_householder))[0]


def test_the_users_rows_come_before_those_that_ship(launch_cache):
    write_table(launch_cache / "launches.json", {Key("9.0", 128, 128, 2): marked(99)}, {"devices": ["here"]})
    found = [choose("9.0", 128, 128, n).chunk_prepare_wy["maxnreg"] for n in (1, 2, 3)]
    assert found == [168, 99, 99]
    assert json.loads((launch_cache / "launches.json").read_text())["about"] == {"devices": ["here"]}
    assert list(launch_cache.iterdir()) == [launch_cache / "launches.json"]


ROW = {"architecture": "cpu", "key_dim": 64, "value_dim": 192, "num_householder": 1, **asdict(PLAIN)}
WRONG = json.dumps({"rows": [ROW | {"chunk_bwd_qkg": MISCOMPILED}]})


@pytest.mark.parametrize("text", ["{", '{"rows": [{"architecture": "9.0"}]}', WRONG])
def test_a_file_that_cannot_be_used_is_named(launch_cache, text):
    (launch_cache / "launches.json").write_text(text)
    with pytest.raises(ValueError, match="fla-bench tune") as raised:
        choose("cpu", 64, 64, 1)
    assert str(launch_cache / "launches.json") in str(raised.value)
