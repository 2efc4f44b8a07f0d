"""`fla-bench decode`: time the operator's decoding step of one token, beside a copy of its states.

A step reads and writes each state once, whatever n_h, so a copy is what it cannot beat. Both run over many
sets of states in turn, more than any cache holds, and on a GPU as one CUDA graph: launched one by one, small
steps take the host's time.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fla_train.bench.measure import median_times, recorded
from fla_train.kernels.delta_product import delta_product_step
from fla_train.kernels.delta_product.selfcheck import relative_rms
from fla_train.kernels.sizes import ceil_div

COLD_BYTES = 256 << 20  # of states that take turns on a GPU
CHECKED_HEADS = 64  # against the fp64 definition
WORST = 2e-2  # relative RMS error above which a step is wrong rather than rounded

HEADER = (
    "| B x H | K | V | n_h | state | us | copy us | share of copy | error of o | of the state |",
    "|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Row:
    """What was found of one size."""

    heads: int  # B x H
    key_dim: int
    value_dim: int
    num_householder: int
    state: str  # its dtype
    microseconds: float
    copy_microseconds: float
    error: float  # relative RMS of o
    state_error: float

    def markdown(self) -> str:
        """The row of the table under `HEADER`."""
        share = self.copy_microseconds / self.microseconds
        return (
            f"| {self.heads} | {self.key_dim} | {self.value_dim} | {self.num_householder} | {self.state} "
            f"| {self.microseconds:.1f} | {self.copy_microseconds:.1f} | {share:.2f} "
            f"| {self.error:.1e} | {self.state_error:.1e} |"
        )


def bench_decode(
    heads: int,
    key_dim: int,
    value_dim: int,
    num_householder: int,
    dtype: torch.dtype,
    state_dtype: torch.dtype,
    device: torch.device,
    *,
    rounds: int = 15,
) -> Row:
    """Time a gated step with the L2 norm inside, of `heads` heads in all.

    Raises:
        ValueError: the step computes wrong numbers.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(heads, *sizes, generator=generator, device=device)

    inputs = {
        "q": normal(1, key_dim).to(dtype),
        "k": normal(num_householder, 1, key_dim).to(dtype),
        "v": normal(num_householder, 1, value_dim).to(dtype),
        "beta": 2 * torch.rand(heads, num_householder, 1, generator=generator, device=device),
        "g": -0.1 * F.softplus(normal(1)),
    }
    size = heads * key_dim * value_dim * state_dtype.itemsize
    turns = max(1, ceil_div(COLD_BYTES, size)) if device.type == "cuda" else 1
    states = [normal(1, key_dim, value_dim).to(state_dtype) for _ in range(turns)]
    copies = [torch.empty_like(state) for state in states]

    def steps() -> list[tuple[Tensor, Tensor]]:
        # All are kept, or each new state would take the place of the one before, which the cache still holds.
        return [delta_product_step(**inputs, state=state, qk_l2norm=True) for state in states]

    def copy() -> None:
        for state, target in zip(states, copies, strict=True):
            target.copy_(state)

    with torch.no_grad():
        error, state_error = _errors(inputs, states[0])
        if not max(error, state_error) <= WORST:  # a NaN is wrong
            raise ValueError(f"the step is wrong by {error:.1e} in o and {state_error:.1e} in the state")
        runs = {name: recorded(run, device) for name, run in (("step", steps), ("copy", copy))}
        times = {name: 1e3 * ms / turns for name, ms in median_times(runs, device, rounds).items()}
    name = str(state_dtype).removeprefix("torch.")
    return Row(
        heads, key_dim, value_dim, num_householder, name, times["step"], times["copy"], error, state_error
    )


def _errors(inputs: dict[str, Tensor], state: Tensor) -> tuple[float, float]:
    """Of o and of the new state for the first heads, against the definition in fp64."""
    some = {name: x[:CHECKED_HEADS] for name, x in (inputs | {"state": state}).items()}
    exact = {name: x.double() for name, x in some.items()}
    expected = delta_product_step(**exact, qk_l2norm=True, backend="recurrent")
    found = delta_product_step(**some, qk_l2norm=True)
    return tuple(relative_rms(x, y) for x, y in zip(found, expected, strict=True))
