"""Context parallelism: ranks that share sequences compute what one process with whole sequences does."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from warm_ranks import WarmRanks

from fla_train.data.sampler import Batch, pack
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.features.evaluation import evaluate
from fla_train.training.features.statistics import Statistics
from fla_train.training.process_group import RankMesh, join
from fla_train.training.run_data import split_batch

ROWS, LENGTH = 2, 24
LAYOUTS = {  # where documents begin in each of the rows; None: they are not packed
    "rows": None,
    "inside parts": [[5, 20], [1]],
    "at the bounds of parts": [[12], [12]],
    "over several parts": [[2, 3, 4, 23], []],
}
MODELS = {
    "DeltaNet": {"num_householder": 1, "use_forget_gate": False},
    "Gated DeltaNet": {"num_householder": 1, "use_forget_gate": True, "recompute_operator": True},
    "DeltaProduct": {"num_householder": 3, "use_forget_gate": False},
    "hybrid of Gated DeltaProduct": {
        "num_householder": 2,
        "use_forget_gate": True,
        "layer_types": ["linear_attention", "full_attention", "sliding_attention"],
        "sliding_window": 9,
        "num_key_value_heads": 1,
    },
}


def make_model(fields: dict) -> DeltaProductForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3, "num_heads": 2, "head_dim": 8}
    return DeltaProductForCausalLM(DeltaProductConfig(**sizes, **fields)).double().train()


def make_batch(boundaries: list[list[int]] | None) -> Batch:
    ids = torch.randint(0, 40, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    if boundaries is None:
        return Batch(ids, ids)
    return pack(ids, [np.array(found, dtype=np.int64) for found in boundaries])


def loss_and_gradients(model: nn.Module, batch: Batch, targets: int) -> dict[str, Tensor]:
    """Return the batch's part of the mean loss over `targets`, and its gradients."""
    given = {name: x for name, x in batch._asdict().items() if x is not None}
    model.zero_grad()
    loss = model(**given, num_items_in_batch=targets).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


def losses_by_token(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of each token as the target of the token before, [B, T]; 0 without a target."""
    if batch.context_part is not None:
        options = {"shift_labels": batch.shift_labels, "context_part": batch.context_part}
        return model.token_losses(batch.input_ids, cu_seqlens=batch.cu_seqlens, **options)
    losses = model.token_losses(batch.input_ids, cu_seqlens=batch.cu_seqlens)
    return nn.functional.pad(losses.masked_fill(batch.targets() == -100, 0), (0, 1))


def evaluated(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the validation losses of a batch by context length, over all ranks."""
    engine = SimpleNamespace(module=model, device=batch.input_ids.device, eval=model.eval, train=model.train)
    engine.torch_autocast_enabled, engine.torch_autocast_dtype = lambda: False, lambda: torch.bfloat16
    losses = evaluate(engine, [batch], seq_len=LENGTH, buckets=3)
    return {f"validation {name}": torch.tensor(value) for name, value in losses.items()}


def gate_statistics(model: nn.Module, batch: Batch, mesh: RankMesh) -> dict[str, Tensor]:
    """Return the statistics of the gates in a step whose first micro-batch is `batch`."""
    optimizer = SimpleNamespace(single_partition_of_fp32_groups=[torch.zeros(1)])
    engine = SimpleNamespace(optimizer=optimizer)
    statistics, values = Statistics(), {}
    statistics.attach(SimpleNamespace(engine=engine, model=model, mesh=mesh, is_observed=bool))
    statistics.before_step(1, [batch])
    losses_by_token(model, batch)
    statistics.after_step(1, values)
    return {name: value for name, value in values.items() if "/" in name}


def compare(fields: dict, checkpointing: bool) -> tuple[dict[str, float], set[int]]:
    """Return, on each rank, relative errors against whole rows, and the numbers of parts of activations."""
    join(on_gpu=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = RankMesh(world)
    errors: dict[str, float] = {}
    parts: set[int] = set()
    for layout, boundaries in LAYOUTS.items():
        model, batch = make_model(fields), make_batch(boundaries)
        targets = int((batch.targets() != -100).sum())
        expected = loss_and_gradients(model, batch, targets)
        expected["losses by token"] = losses_by_token(model, batch).chunk(world, dim=1)[rank]
        expected |= gate_statistics(model, batch, SimpleNamespace(context=None))
        expected |= evaluated(model, batch)

        def cut(module: nn.Module, inputs: tuple, output: object, length: int = batch.input_ids.shape[1]):
            while isinstance(output, tuple):
                output = output[0]
            if isinstance(output, Tensor):
                parts.add(length // output.shape[1])

        if checkpointing:
            model.gradient_checkpointing_enable()
        for module in model.model.modules():
            module.register_forward_hook(cut)
        part = split_batch(batch, mesh.context)
        found = loss_and_gradients(model, part, targets)
        for tensor in found.values():
            dist.all_reduce(tensor)
        found["losses by token"] = losses_by_token(model, part)
        found |= gate_statistics(model, part, mesh)
        found |= evaluated(model, part)
        for name, tensor in expected.items():
            error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-9)
            errors[f"{name}, {layout}"] = error.item()
    dist.barrier()  # a rank that leaves would lose its unsent messages
    return errors, parts


FAST = [("Gated DeltaNet", 2), ("hybrid of Gated DeltaProduct", 4)]


@pytest.mark.parametrize(
    ("name", "world"),
    [
        pytest.param(name, world, marks=() if (name, world) in FAST else pytest.mark.long)
        for name in MODELS
        for world in (2, 4)
    ],
)
def test_parts_have_the_losses_and_gradients_of_whole_rows(warm_ranks: WarmRanks, name: str, world: int):
    for errors, parts in warm_ranks.run(world, compare, MODELS[name], name == "Gated DeltaNet"):
        assert max(errors.values()) < 1e-9, max(errors, key=errors.get)
        assert parts == {world}  # no module has seen more tokens than its rank's
