"""Validation losses by context length, against each token's loss computed alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fla_train.data.sampler import Batch, pack
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.features.evaluation import bucket_names, evaluate, validation_record
from tests.models.small_models import small_config

LENGTH = 20


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine that `evaluate` needs, on one rank."""
    torch.manual_seed(0)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    model = DeltaProductForCausalLM(small_config(backend="chunk"))
    return SimpleNamespace(
        module=model,
        device=torch.device("cpu"),
        eval=model.eval,
        train=model.train,
        torch_autocast_enabled=lambda: False,
        torch_autocast_dtype=lambda: torch.bfloat16,
    )


def one_by_one(model: torch.nn.Module, pieces: list[torch.Tensor]) -> dict[int, list[float]]:
    """{context: losses of the tokens it precedes} of rows or documents that begin with an empty state."""
    found: dict[int, list[float]] = {}
    for piece in pieces:
        logits = model(piece[None]).logits[0].double()
        for context in range(1, len(piece)):
            loss = -torch.log_softmax(logits[context - 1], -1)[piece[context]].item()
            found.setdefault(context, []).append(loss)
    return found


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("buckets", [1, 3, 4, 50])
@torch.no_grad()
def test_losses_by_context(engine: SimpleNamespace, packed: bool, buckets: int):
    ids = torch.randint(31, (3, LENGTH))
    if packed:
        batch = pack(ids, [np.array([1, 9]), np.array([], dtype=np.int64), np.array([19])])
        pieces = [ids[0, :1], ids[0, 1:9], ids[0, 9:], ids[1], ids[2, :19], ids[2, 19:]]
    else:
        batch, pieces = Batch(ids, ids), list(ids)
    alone = one_by_one(engine.module, pieces)
    result = evaluate(engine, [batch], seq_len=LENGTH, buckets=buckets)
    everything = [loss for losses in alone.values() for loss in losses]
    assert result["loss"] == pytest.approx(np.mean(everything), rel=1e-5)
    names = bucket_names(LENGTH, min(buckets, LENGTH - 1))
    assert names[0].startswith("1-") and names[-1].endswith(f"-{LENGTH - 1}")
    for name in names if buckets > 1 else ():
        first, last = map(int, name.split("-"))
        mine = [loss for context in range(first, last + 1) for loss in alone[context]]
        assert result[f"loss_at/{name}"] == pytest.approx(np.mean(mine), rel=1e-5)
    assert engine.module.training


def test_bits_per_byte_of_the_targets(engine: SimpleNamespace):
    ids, sizes = torch.randint(31, (3, LENGTH)), torch.arange(31)
    result = evaluate(engine, [Batch(ids, ids)], seq_len=LENGTH, buckets=2, token_sizes=sizes)
    nats = result["loss"] * 3 * (LENGTH - 1)
    assert result["bits_per_byte"] == pytest.approx(nats / np.log(2) / ids[:, 1:].sum().item())
    assert "bits_per_byte" not in evaluate(engine, [Batch(ids, ids)], seq_len=LENGTH, buckets=2)


def test_batches_add_up_and_may_be_absent(engine: SimpleNamespace):
    ids = torch.randint(31, (4, LENGTH))
    whole = evaluate(engine, [Batch(ids, ids)], seq_len=LENGTH, buckets=2)
    parts = evaluate(engine, [Batch(i, i) for i in ids.split([1, 3])], seq_len=LENGTH, buckets=2)
    assert parts == pytest.approx(whole, rel=1e-6)
    assert evaluate(engine, [], seq_len=LENGTH, buckets=2) == {"loss": 0.0}


def test_weighted_mean_of_parts():
    web, code = {"loss": 3.0, "loss_at/1-9": 3.5, "loss_at/10-19": 2.5}, {"loss": 1.0, "loss_at/1-9": 1.5}
    record = validation_record({"web": (web, 0.75), "code": (code, 0.25)})
    assert record == {
        **{"validation_loss": 2.5, "validation_loss_at/1-9": 3.0, "validation_loss_at/10-19": 2.5},
        **{"validation_loss/web": 3.0, "validation_loss/code": 1.0, "validation_perplexity": np.exp(2.5)},
        **{"validation_perplexity/web": np.exp(3.0), "validation_perplexity/code": np.exp(1.0)},
    }
    diverged = validation_record({"": ({"loss": float("nan")}, 1.0)})
    assert np.isnan(diverged["validation_perplexity"])
