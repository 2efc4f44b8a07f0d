"""Which steps are skipped, against the plain statistics of the losses before."""

import math
import statistics

import pytest
import torch

from fla_train.training.features.bad_steps import WINDOW, BadSteps

CPU = torch.device("cpu")


def fp64(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def judge(bad_steps: BadSteps, loss: float, grad_norm: float = 0.5) -> tuple[float, bool]:
    scale, skip = bad_steps.decide(fp64(loss), fp64(grad_norm))
    assert scale.dtype == skip.dtype == torch.float32
    return scale.item(), bool(skip)


@pytest.mark.parametrize(
    ("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
def test_what_is_not_finite_is_skipped_and_not_remembered(loss: float, norm: float):
    bad_steps = BadSteps(CPU, max_grad_norm=1.0)
    assert judge(bad_steps, 2.0) == (1.0, False)
    before = bad_steps.state_dict()["losses"].tolist()
    assert judge(bad_steps, loss, norm)[1]
    assert bad_steps.state_dict()["losses"].tolist() == before == [1.0, 2.0, 0.0]


@pytest.mark.parametrize(("norm", "scale"), [(0.5, 1.0), (4.0, 8.0)])
def test_a_large_gradient_is_scaled_down(norm: float, scale: float):
    assert judge(BadSteps(CPU, max_grad_norm=0.5), 1.0, norm)[0] == pytest.approx(scale, rel=1e-5)
    assert judge(BadSteps(CPU, max_grad_norm=0.0), 1.0, norm)[0] == 1.0


def test_a_spike_lies_so_many_deviations_above_the_mean():
    losses = [3 + math.sin(i) for i in range(WINDOW)]
    mean, deviation = statistics.fmean(losses), statistics.pstdev(losses)

    def bad_steps() -> BadSteps:
        bad_steps = BadSteps(CPU, max_grad_norm=1.0, spike_deviations=4.0)
        assert not any(judge(bad_steps, loss)[1] for loss in losses)
        assert bad_steps.state_dict()["losses"].tolist() == pytest.approx([WINDOW, mean, deviation**2])
        return bad_steps

    assert not judge(bad_steps(), mean + 3.99 * deviation)[1]
    assert judge(bad_steps(), mean + 4.01 * deviation)[1]
    later = bad_steps()
    assert not judge(later, mean - 10 * deviation)[1]  # downwards is welcome
    # The newest loss weighs 1 / WINDOW from then on: 0.99 var + 0.01 * 0.99 * (10 deviations)^2.
    expected = [WINDOW + 1, mean - 10 * deviation / WINDOW, 1.98 * deviation**2]
    assert later.state_dict()["losses"].tolist() == pytest.approx(expected)


def test_nothing_is_a_spike_before_the_window_is_full_nor_where_it_is_turned_off():
    new, off = (BadSteps(CPU, max_grad_norm=1.0, spike_deviations=2.0), BadSteps(CPU, max_grad_norm=1.0))
    for _ in range(WINDOW - 1):
        assert not judge(new, 1.0)[1]
    assert not judge(new, 100.0)[1]
    for _ in range(2 * WINDOW):
        judge(off, 1.0)
    assert not judge(off, 100.0)[1]
