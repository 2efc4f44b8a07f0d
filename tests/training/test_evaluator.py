"""Validation losses by context length, against each token's loss computed alone."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fla_train.data.dataset import TokenDataset
from fla_train.data.prepare import prepare
from fla_train.data.sampler import Batch, pack
from fla_train.data.tokenizers import token_bytes
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.training.features.evaluation import TextEvaluation, bucket_names, evaluate, validation_record
from tests.models.small_models import small_config

LENGTH = 20


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The engine that `evaluate` needs, on one rank."""
    torch.manual_seed(0)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    model = DeltaProductForCausalLM(small_config(backend="chunk", vocab_size=320))
    # Dropout, which must be off.
    model.model.embeddings.register_forward_hook(
        lambda module, _, x: torch.nn.functional.dropout(x, 0.5, module.training)
    )
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
    model.eval()
    for piece in pieces:
        logits = model(piece[None]).logits[0].double()
        for context in range(1, len(piece)):
            loss = -torch.log_softmax(logits[context - 1], -1)[piece[context]].item()
            found.setdefault(context, []).append(loss)
    model.train()
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


def test_a_mixture_is_evaluated_in_equal_parts_and_weighted(engine, make_config, corpus, tmp_path):
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"{i} " * 3}) + "\n" for i in range(400)))
    parts = f"{{a: {{weight: 3, path: {corpus}}}, b: {{weight: 1, path: {tmp_path}}}}}"
    mixed = ["data=mixture", "data.path=null", f"+data.mixture={parts}", "data.document_boundaries=true"]
    config = make_config(*mixed, "trainer.eval_tokens=300")
    data, evaluation = prepare(config.data, log=lambda line: None), TextEvaluation()
    mesh = SimpleNamespace(data_rank=0, data_world=1, context=None)
    watchdog = SimpleNamespace(beat=lambda *_: None)
    evaluation.attach(SimpleNamespace(config=config, data=data, engine=engine, mesh=mesh, watchdog=watchdog))
    record, sums = evaluation.evaluate(1), {}
    for name, part in data.corpora().items():
        dataset, first_four = TokenDataset(part.folder, "validation", 32), np.arange(4)
        pieces = [
            piece
            for ids, starts in zip(dataset.sequences(first_four), dataset.boundaries(first_four), strict=True)
            for piece in ids.tensor_split(starts.tolist())
        ]
        losses = [loss for losses in one_by_one(engine.module, pieces).values() for loss in losses]
        sizes = token_bytes(data.tokenizer())[torch.cat([piece[1:] for piece in pieces])].sum()
        sums[name] = np.array([np.mean(losses), np.sum(losses) / np.log(2) / sizes])
        assert record[f"validation_loss/{name}"] == pytest.approx(sums[name][0], rel=1e-5)
    found = [record["validation_loss"], record["validation_bits_per_byte"]]
    assert found == pytest.approx(0.75 * sums["a"] + 0.25 * sums["b"], rel=1e-5)


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
