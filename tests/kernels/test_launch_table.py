"""The table of launch options: which row serves a call, what a user's file may say, and what it may not."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from fla_train.kernels.delta_product import delta_product
from fla_train.kernels.delta_product.select import override
from fla_train.kernels.delta_product.triton.launch_table import (
    Key,
    LaunchOptions,
    as_table,
    fallback,
    lookup,
    nearest,
    option_error,
    write_table,
)
from fla_train.kernels.delta_product.triton.launches import ROWS

pytestmark = pytest.mark.usefixtures("launch_cache")
PLAIN = fallback()


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


def test_a_row_does_not_serve_where_its_options_miscompile():
    three = {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 3}
    table = {Key("9.0", 64, 128, 1): replace(PLAIN, chunk_bwd_qkg=three)}
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


def choose(
    architecture: str, key_dim: int, value_dim: int, num_householder: int, dtype: torch.dtype = torch.bfloat16
) -> LaunchOptions:
    return lookup(dtype, Key.of(architecture, key_dim, value_dim, num_householder))[0]


def test_the_users_rows_come_before_those_that_ship(launch_cache):
    write_table(launch_cache / "launches.json", {Key("9.0", 128, 128, 2): marked(99)}, {"devices": ["here"]})
    found = [choose("9.0", 128, 128, n).chunk_prepare_wy["maxnreg"] for n in (1, 2, 3)]
    assert found == [168, 99, 99]
    assert json.loads((launch_cache / "launches.json").read_text())["about"] == {"devices": ["here"]}
    assert list(launch_cache.iterdir()) == [launch_cache / "launches.json"]


MISCOMPILED = {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 3}  # where V = 192
ROW = {"architecture": "cpu", "key_dim": 64, "value_dim": 192, "num_householder": 1, **asdict(PLAIN)}
WRONG = json.dumps({"rows": [ROW | {"chunk_bwd_qkg": MISCOMPILED}]})


@pytest.mark.parametrize("text", ["{", '{"rows": [{"architecture": "9.0"}]}', WRONG])
def test_a_file_that_cannot_be_used_is_named(launch_cache, text):
    (launch_cache / "launches.json").write_text(text)
    with pytest.raises(ValueError, match="fla-bench tune") as raised:
        choose("cpu", 64, 64, 1)
    assert str(launch_cache / "launches.json") in str(raised.value)


def test_forced_options_reach_the_kernels_and_leave_afterwards():
    """Tiles of 128 columns of V must give what tiles of 64 give, from the interpreter to the last digit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 5, *shape, device=device) for shape in ((1, 8), (2, 1, 8), (2, 1, 80)))
    beta = torch.rand(1, 5, 2, 1, device=device)
    wide = replace(PLAIN, chunk_fwd={"BV": 128, "num_warps": 8, "num_stages": 1})
    with override(options=wide):
        found, _ = delta_product(q, k, v, beta, qk_l2norm=True, backend="triton")
    expected, _ = delta_product(q, k, v, beta, qk_l2norm=True, backend="recurrent")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
