"""Times, memory and errors of functions whose times, memory and errors are known."""

import sys
import time
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench.compare import validation_error
from fla_train.bench.implementations import Implementation, make_problem, ours, peers
from fla_train.bench.kernels import bench_shape
from fla_train.bench.measure import errors, median_times, peak_memory
from fla_train.bench.roofline import Ceilings, Shape
from fla_train.kernels.delta_product import delta_product

CPU = torch.device("cpu")
SHAPE = Shape(2, 20, 3, 8, 4, 2, gated=True, element_size=4)
CEILINGS = Ceilings(1e12, 1e11, "given")
FLA_RULE, FLA_PRODUCT = "fla chunk_gated_delta_rule", "fla chunk_gated_delta_product"
QLA, ATTN_GYM = "FlashQLA chunk_gated_delta_rule", "attn-gym chunk_gdn"


def bench(*implementations: Implementation, shape: Shape = SHAPE):
    return list(bench_shape(shape, implementations, torch.float32, CPU, CEILINGS, norm=True, rounds=1))


def broken(change: str) -> Implementation:
    """The recurrence, wrong in one place only."""

    def run(p):
        q, beta, scale = p.q, p.beta, None
        if change == "scale":
            scale = 1.01 * q.shape[-1] ** -0.5
        if change == "gradient of q":
            q = q + (q - q.detach()) * 0.02
        if change == "last sequence's last head":
            mask = torch.ones_like(beta)
            mask[-1, :, :, -1] = 0.9
            beta = beta * mask
        o, _ = delta_product(q, p.k, p.v, beta, p.g, scale=scale, qk_l2norm=p.norm, backend="recurrent")
        return o * float("nan") if change == "nan" else o

    return Implementation(change, run)


@pytest.mark.parametrize("change", ["scale", "gradient of q", "last sequence's last head", "nan"])
def test_a_wrong_kernel_gets_no_speed(change: str) -> None:
    good, bad = ours(["chunk"])[0], broken(change)
    rows = {row.kernel: row for row in bench(bad, good)}
    assert rows[change].refused.startswith("wrong by")
    assert rows[change].forward_ms is rows[change].both_ms is rows[change].ns_per_token_head is None
    assert "no speed: wrong by" in rows[change].markdown()
    sound = rows["fla_train chunk"]
    assert sound.refused is None
    assert min(sound.both_ms, sound.forward_ms) > 0
    assert sound.ns_per_token_head == pytest.approx(sound.both_ms * 1e6 / (2 * 20 * 3))


@pytest.mark.parametrize("calls", [0, 1])  # that succeed: the second is made for errors
def test_a_kernel_that_fails_is_told_from_the_rest(calls: int) -> None:
    good, left = ours(["chunk"])[0].run, [None] * calls

    def fail(problem):
        if not left:
            raise RuntimeError("no such\ninstruction")
        left.pop()
        return good(problem)

    failed, sound = bench(Implementation("failing", fail), *ours(["recurrent"]))
    assert failed.refused == "RuntimeError: no such instruction"
    assert sound.both_ms > 0


def test_long_sequences_are_checked_at_their_start_and_as_a_whole(monkeypatch) -> None:
    """The recurrence ends after 7 tokens, and outputs and gradients there must not know what follows."""
    monkeypatch.setattr("fla_train.bench.measure.CHECKED_TOKENS", 7)
    problem = make_problem(SHAPE, torch.float32, CPU, norm=True)
    run = ours(["chunk"])[0].run
    found = errors(run, problem)
    assert found.keys() == {"o", "dq", "dk", "dv", "dbeta", "dg"}
    assert validation_error(found, torch.float32) is None
    assert max(found.values()) < 1e-5

    def forgets(p):
        """Wrong from the tenth token on: the state starts anew."""
        cut = replace(p, q=p.q[:, 10:], k=p.k[:, 10:], v=p.v[:, 10:], beta=p.beta[:, 10:], g=p.g[:, 10:])
        return torch.cat([run(p)[:, :10], run(cut)], dim=1)

    assert validation_error(errors(forgets, problem), torch.float32).startswith("wrong by o")


def test_a_gradient_that_vanishes_is_measured_by_the_others() -> None:
    """Of one token dg is zero; with the L2 norm and K = 1, dq and dk nearly are."""
    run = ours(["chunk"])[0].run
    for tokens, key_dim in ((1, 8), (8, 1)):
        shape = Shape(1, tokens, 2, key_dim, key_dim, 1, gated=True, element_size=4)
        problem = make_problem(shape, torch.float32, CPU, norm=True)
        assert validation_error(errors(run, problem), torch.float32) is None
        for name in ("q", "k", "g"):

            def wrong(p, name=name):
                x = p.leaves[name]
                return run(p) + 1e-3 * (x - x.detach()).sum()

            assert f"d{name} " in validation_error(errors(wrong, problem), torch.float32)


def test_the_peer_agrees_where_it_applies() -> None:
    (peer,), missing = peers(CPU)
    assert not missing
    for gated in (True, False):
        (row,) = bench(peer, shape=Shape(1, 70, 2, 16, 16, 1, gated, 4))
        assert row.refused is None, row.refused
        assert max(row.errors.values()) < 1e-4
    (row,) = bench(peer)
    assert row.refused == "knows one Householder step per token only"


@pytest.fixture
def stand_ins(monkeypatch) -> None:
    """The packages that need a GPU, with our operator behind their signatures and layouts."""

    def rule(q, k, v, g=None, beta=None, num_householder=1, use_qk_l2norm_in_kernel=False):
        def split(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, num_householder))

        options = {"qk_l2norm": use_qk_l2norm_in_kernel, "backend": "chunk"}
        return delta_product(q, split(k), split(v), split(beta).to(torch.float32), g, **options)

    def install(name: str, **content: object) -> None:
        module = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    install("fla")
    install("fla.ops")
    install("fla.ops.delta_rule", chunk_delta_rule=lambda q, k, v, beta, **o: rule(q, k, v, None, beta, **o))
    install("fla.ops.gated_delta_rule", chunk_gated_delta_rule=rule)
    install("fla.ops.gated_delta_product", chunk_gated_delta_product=rule)
    install("flash_qla", chunk_gated_delta_rule=lambda **tensors: rule(**tensors))
    install("attn_gym")
    install("attn_gym.linear", chunk_gdn=rule, l2norm=lambda x: F.normalize(x.float(), dim=-1).to(x.dtype))


@pytest.mark.parametrize(
    ("num_householder", "gated", "norm", "measured"),
    [
        (1, True, True, [FLA_RULE, QLA, ATTN_GYM]),
        (1, False, True, ["fla chunk_delta_rule"]),
        (2, True, True, [FLA_PRODUCT, QLA, ATTN_GYM]),
        (2, False, False, [FLA_PRODUCT]),
        (1, True, False, [FLA_RULE, QLA, ATTN_GYM]),
        (3, True, False, [FLA_PRODUCT, QLA, ATTN_GYM]),
    ],
)
def test_peers_get_their_own_layout(stand_ins, num_householder, gated, norm, measured) -> None:
    """A wrong view of a tensor would show as an error."""
    shape = Shape(2, 20, 3, 8, 4, num_householder, gated, 2)
    implementations, missing = peers(torch.device("cuda"))
    assert not missing
    rows = list(bench_shape(shape, implementations, torch.bfloat16, CPU, CEILINGS, norm=norm, rounds=1))
    assert [row.kernel.removesuffix(" (may run FlashQLA)") for row in rows if row.errors] == measured
    assert [row for row in rows if row.errors and row.refused] == []


def test_a_kernel_that_is_not_ready_in_time_is_left_out() -> None:
    shape = Shape(1, 16, 1, 8, 8, 1, False, 4)
    (sound,) = ours(["chunk"], recompute=False)
    slow = Implementation("slow", lambda problem: time.sleep(20))
    start = time.monotonic()
    rows = list(
        bench_shape(shape, [slow, sound], torch.float32, CPU, CEILINGS, norm=True, rounds=1, patience=0.5)
    )
    assert time.monotonic() - start < 15
    assert [row.kernel for row in rows if row.refused] == ["slow"]
    assert [row.both_ms is not None for row in rows] == [False, True]


def test_a_missing_peer_is_named(monkeypatch) -> None:
    monkeypatch.setattr("fla_train.bench.implementations.find_spec", lambda name: None)
    found, missing = peers(torch.device("cuda"))
    assert not found and len(missing) == 3


def test_times_take_turns_and_are_medians() -> None:
    order = []

    def sleeper(name: str, seconds: list[float]):
        def run() -> None:
            order.append(name)
            time.sleep(seconds[min(order.count(name), len(seconds)) - 1])

        return run

    # Each first one warms up; an outlier among three does not count.
    runs = {"a": sleeper("a", [0.03, 0.03, 0.5, 0.03]), "b": sleeper("b", [0.06])}
    times = median_times(runs, CPU, rounds=3)
    assert order == ["a", "b"] + ["a", "b"] * 3
    assert 30 <= times["a"] < 300
    assert 60 <= times["b"] < 300


def test_peak_memory_is_that_of_the_highest_point() -> None:
    kept = torch.zeros(1000)

    def run() -> None:
        first = torch.zeros(100_000)  # 400 kB
        second = first + 1
        del first
        third = second * kept[0]
        del second
        torch.cat([third, third])  # 400 kB and 800 kB, the highest point

    assert peak_memory(run, CPU) == pytest.approx(1_200_000, rel=0.01)
