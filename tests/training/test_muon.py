"""Muon on ZeRO-2's partitions against `torch.optim.Muon` on whole matrices."""

from collections.abc import Callable

import engine_steps
import pytest
import torch
from warm_ranks import WarmRanks

from fla_train.training.config import TrainConfig
from fla_train.training.optimizer import PartitionedMuon, hidden_matrices, overlaps, parameter_groups

SHAPES = [(3, 5), (9, 2), (4, 4), (3, 5)]
LR, DECAY, MOMENTUM = 0.1, 0.2, 0.9
# Muon's products are bf16, so an fp32 rounding of a gradient may show as one of bf16. These are five times
# what roundings by one ulp, of the initial weights or of the products, change in four steps.
BF16 = {"losses": 1e-3, "grad_norms": 1e-2, "eval": 1e-3}


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_parts_cover_every_element_of_every_matrix_once(world: int):
    total = sum(rows * columns for rows, columns in SHAPES)
    size = -(-total // world)
    owners = torch.zeros(world * size, dtype=torch.int64)
    for rank in range(world):
        for (rows, columns), offset, begin, end in overlaps(SHAPES, rank * size, size):
            assert rank * size <= begin < end <= (rank + 1) * size
            assert offset <= begin and end <= offset + rows * columns
            owners[begin:end] += 1
    assert owners[:total].eq(1).all() and owners[total:].eq(0).all()


def partition_of(matrices: list[torch.Tensor], padding: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.cat([*(m.detach().flatten() for m in matrices), torch.zeros(padding)]))


def adamw(parameter: torch.Tensor) -> torch.optim.AdamW:
    return torch.optim.AdamW([{"params": [parameter]}], lr=LR, fused=True)


def test_on_one_rank_the_partition_takes_the_steps_of_whole_matrices(alone: None):
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    line, vector = partition_of(whole, padding=3), torch.nn.Parameter(torch.randn(7))
    plain_vector = torch.nn.Parameter(vector.detach().clone())
    reference = torch.optim.Muon(
        whole, lr=LR, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    reference_rest = adamw(plain_vector)
    muon = PartitionedMuon(whole, adamw(vector), lr=LR, weight_decay=DECAY, momentum=MOMENTUM)
    muon.param_groups[0]["params"] = [line]  # as ZeRO does
    for skip, scale in ((False, 4.0), (True, 1.0), (False, 1.0), (False, 9.0)):
        gradients = [torch.randn(shape) for shape in SHAPES]
        line.grad = scale * partition_of(gradients, padding=3).detach()
        vector.grad = scale * torch.ones(7)
        muon.grad_scale, muon.found_inf = torch.tensor(scale), torch.tensor(float(skip))
        muon.step()
        if not skip:
            plain_vector.grad = torch.ones(7)
            for matrix, gradient in zip(whole, gradients, strict=True):
                matrix.grad = gradient
            reference.step()
            reference_rest.step()
    # torch's Muon works in bf16 inside, so that a rounding of the momentum may show as one of bf16.
    torch.testing.assert_close(line, partition_of(whole, padding=3), rtol=0, atol=LR * 2**-6)
    torch.testing.assert_close(vector, plain_vector)
    assert set(muon.state[line]) == {"momentum_buffer"} and muon.state[vector]["step"] == 3


@pytest.fixture(scope="module")
def config(make_config: Callable[..., TrainConfig]) -> TrainConfig:
    return make_config(
        "optimizer=muon",
        "optimizer.lr=1e-2",
        "optimizer.eps=1e-3",
        "optimizer.max_grad_norm=0.5",
        "trainer.precision=fp32",
        "launch.device=cpu",
        "model.num_heads=3",  # sizes that two ranks do not divide: ZeRO cuts matrices and pads
    )


def test_two_ranks_and_one_take_the_steps_of_plain_pytorch(config: TrainConfig, warm_ranks: WarmRanks):
    model, settings = engine_steps.make_model(config), config.optimizer
    matrices = hidden_matrices(model)
    taken = {id(matrix) for matrix in matrices}
    rest = [
        group | {"params": [p for p in group["params"] if id(p) not in taken]}
        for group in parameter_groups(model, settings.weight_decay)
    ]
    optimizers = [
        torch.optim.Muon(
            matrices,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(
            rest, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps, weight_decay=0.0
        ),
    ]
    assert all(name.endswith("proj.weight") for name, p in model.named_parameters() if id(p) in taken)
    plain = engine_steps.reference(model, optimizers, settings.max_grad_norm)
    for result in engine_steps.run_layouts(warm_ranks, config, [(1, 2), (2, 4)]).values():
        for key, rounding in BF16.items():
            assert result[key] == pytest.approx(plain[key], rel=rounding), key
        assert result["grad_norms"][0] == pytest.approx(plain["grad_norms"][0], rel=1e-5)
        assert result["poisoned_skipped"] and result["poisoned_unchanged"] and result["healthy_changed"]
