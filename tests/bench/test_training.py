"""`fla-bench train` by a CUDA graph, whose replays a CPU computes."""

from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, nn

import fla_train
from fla_train.bench import training
from fla_train.bench.ranks import on_ranks
from fla_train.bench.roofline import Ceilings
from fla_train.training.config import TrainConfig, resolve
from fla_train.training.engine import gradients_of

OVERRIDES = (
    *("model=gated_delta_product/tiny", "model.vocab_size=64", "launch.device=cpu", "logger=none"),
    *("launch.num_processes=1", "trainer.seq_len=16", "trainer.micro_batch_size=2"),
    *("trainer.global_batch_tokens=32", "trainer.activation_checkpointing=selective"),
)


def measure(config: TrainConfig) -> tuple[training.StepRow, int]:
    """The row of a config, and how many passes would have been replays."""
    replays = []

    def graph_pass(module: nn.Module, *, bf16: bool) -> Callable[[Mapping[str, Tensor]], Tensor]:
        def replay(inputs: Mapping[str, Tensor]) -> Tensor:
            replays.append(inputs)
            leaves = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
            loss, gradients = gradients_of(module, leaves, inputs, bf16=bf16)
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient
            return loss

        replay.recordable = True
        return replay

    training.CudaGraphPass, training.records_graph = graph_pass, lambda config: config.trainer.cuda_graph
    return training.measure(config, "ours", Ceilings(1e12, 1e11, "given"), 1, 1), len(replays)


@pytest.mark.parametrize("asked", [True, False])
def test_a_graph_is_replayed_where_it_is_asked_for(asked: bool) -> None:
    config = resolve(fla_train.compose(*OVERRIDES, f"trainer.cuda_graph={str(asked).lower()}"))
    row, replays = on_ranks(1, measure, config)
    assert (replays > 0) == asked
    assert (row.memory_bytes is None) == asked and row.tokens_per_second > 0
    assert ("GiB" in training.markdown(row)) != asked
