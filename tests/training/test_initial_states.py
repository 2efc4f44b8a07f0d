"""States that training starts from, against plain loops over single rows.

Where the learning rate is 0 the model stays as it was drawn, so each step's loss follows from the export.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from fla_train.data.open_dataset import open_contiguous, open_train
from fla_train.data.sampler import Batch, BatchSampler
from fla_train.models.cache import cache_for
from fla_train.models.carried_states import CarriedStates
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.run.resolve import resolve
from fla_train.training.config import TrainConfig
from fla_train.training.features.initial_states import InitialStates
from fla_train.utils.permutation import permute
from fla_train.utils.records import read_metrics
from tests.models.small_models import small_config

Make = Callable[..., TrainConfig]
ROWS, SEQ_LEN, STEPS, EOS = 8, 32, 4, 2
CPU = ["launch.device=cpu", "trainer.precision=fp32"]
FROZEN = [*CPU, "optimizer.lr=0", f"trainer.max_steps={STEPS}", "trainer.eval_every=0"]
MODES = {
    "passing": ["trainer.initial_state=passing", "trainer.zero_state_share=0.3"],
    "noise": ["trainer.initial_state=noise"],
    "scaled": ["trainer.initial_state=noise", "trainer.state_noise=0.1"],
    "contiguous": ["data.contiguous=true"],
    "documents": ["data.contiguous=true", "data.document_boundaries=true"],
    "packed": ["trainer.initial_state=passing", "data.document_boundaries=true"],
}
LAYOUTS = {
    "one rank": ["trainer.micro_batch_size=2"],
    "recomputed": ["trainer.micro_batch_size=8", "trainer.activation_checkpointing=true"],
    "selective": ["trainer.micro_batch_size=8", "trainer.activation_checkpointing=selective"],
    "two ranks": ["trainer.micro_batch_size=2", "launch.num_processes=2"],
}


def train_losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def exported(run: Path) -> DeltaProductForCausalLM:
    return DeltaProductForCausalLM.from_pretrained(
        run / "hf" / f"step-{STEPS:07d}", dtype=torch.float32
    ).eval()


def data_folder(run: Path) -> str:
    return json.loads((run / "plan.json").read_text())["data_folder"]


def summed_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Of all tokens [T] but the first."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="sum")


@pytest.mark.parametrize("layout", ["recomputed", "two ranks"])
def test_passing_hands_each_row_the_final_state_of_another(make_config, warm_ranks, tmp_path, layout):
    warm_ranks.launch(make_config(*FROZEN, *MODES["passing"], *LAYOUTS[layout], f"run.dir={tmp_path}"))
    model, data = exported(tmp_path), open_train(data_folder(tmp_path), SEQ_LEN, seed=0)
    final: list[list[Tensor]] = []
    expected, passed = [], 0
    for step in range(STEPS):
        source = permute(np.arange(ROWS), ROWS, 0, step)
        from_zero = np.random.default_rng((0, step)).random(ROWS) < 0.3
        ids, total, now = data.sequences(np.arange(step * ROWS, (step + 1) * ROWS)), 0.0, []
        for row in range(ROWS):
            cache = cache_for(None, model.config, True, model.device)
            if step and not from_zero[row]:
                passed += 1
                for layer, state in enumerate(final[source[row]]):
                    cache.update_recurrent_state(state, layer)
            with torch.no_grad():
                logits = model(ids[row : row + 1], past_key_values=cache).logits[0]
            total += summed_loss(logits, ids[row]).item()
            now.append([layer.recurrent_states[0].clone() for layer in cache.layers])
        expected.append(total / (ROWS * (SEQ_LEN - 1)))
        final = now
    assert 0 < passed < (STEPS - 1) * ROWS
    assert train_losses(tmp_path) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "layout"), [("contiguous", "one rank"), ("documents", "selective"), ("documents", "two ranks")]
)
def test_contiguous_rows_are_long_sequences(make_config, warm_ranks, tmp_path, mode, layout):
    """Each row's text up to a jump in one pass, or each of its documents, which end with <eos>, in one."""
    options = ["data.max_tokens=700", f"run.dir={tmp_path}"]  # an epoch of a row has two sequences
    warm_ranks.launch(make_config(*FROZEN, *MODES[mode], *LAYOUTS[layout], *options))
    model = exported(tmp_path)
    data = open_contiguous(data_folder(tmp_path), SEQ_LEN, 0, ROWS, document_boundaries=False)
    indices = [np.arange(ROWS) + ROWS * step for step in range(STEPS)]
    ids = torch.cat([data.sequences(of_step).input_ids for of_step in indices], dim=1)
    positions = np.stack([data.locate(of_step)[1] for of_step in indices], axis=1)
    sums, counts = torch.zeros(STEPS, dtype=torch.float64), torch.zeros(STEPS)
    begun = 0
    for row, at in zip(ids, positions, strict=True):
        jumps = ((np.flatnonzero(np.diff(at) != 1) + 1) * SEQ_LEN).tolist()
        ends = (row == EOS).nonzero().flatten().add(1).tolist() if mode == "documents" else []
        bounds = sorted({0, *jumps, *ends, len(row)})
        for first, last in pairwise(bounds):
            with torch.no_grad():
                logits = model(row[None, first:last]).logits[0]
            begun += first in ends
            for place in range(first + 1, last):
                if place % SEQ_LEN:  # a sequence's first token is not a target
                    sums[place // SEQ_LEN] += torch.nn.functional.cross_entropy(
                        logits[place - first - 1].double(), row[place]
                    )
                    counts[place // SEQ_LEN] += 1
    assert bool(begun) == (mode == "documents")
    assert train_losses(tmp_path) == pytest.approx((sums / counts).tolist(), rel=1e-5)


def test_a_hybrid_passes_the_states_of_its_linear_layers(make_config, warm_ranks, tmp_path):
    hybrid = ["model.layer_types=[linear_attention,full_attention]", "model.num_attention_heads=2"]
    warm_ranks.launch(make_config(*FROZEN, *hybrid, *MODES["contiguous"], f"run.dir={tmp_path}"))
    assert "attention layers carry nothing" in (tmp_path / "train.log").read_text()
    shard = torch.load(tmp_path / "checkpoints" / f"step-{STEPS:07d}" / "rank-0.pt")
    saved = shard["features"]["initial_states"]["states"]
    assert {name.split(".")[1] for name in saved} == {"0"}
    assert saved["recurrent.0.0"].flatten(1).any(1).all()


class OneRank:
    """The engine that `InitialStates` needs."""

    device = torch.device("cpu")

    def __init__(self, model: DeltaProductForCausalLM):
        self.module, self.eval, self.train = model, model.eval, model.train

    def __call__(self, **inputs: object):
        return self.module(**inputs)


@pytest.mark.usefixtures("alone")
class TestOneRank:
    """`InitialStates` alone, fed with final states of a known kind."""

    def made(self, kind: str, noise: float | None = None, share: float = 0.0, micro_batch: int = 2):
        model = DeltaProductForCausalLM(small_config("gated_delta_product", backend="chunk"))
        trainer = SimpleNamespace(state_noise=noise or "fitted", zero_state_share=share)
        states, config = InitialStates(), SimpleNamespace(initial_states=kind, seed=5, trainer=trainer)
        batches = BatchSampler(64, micro_batch)
        states.attach(SimpleNamespace(config=config, batches=batches, engine=OneRank(model), log=print))
        self.begin(states, 0)
        assert model.training
        return states

    def begin(self, states: InitialStates, number: int) -> None:
        """Begin step `number`, from 0."""
        states.before_step(number + 1, [self.batch(states)])

    def batch(self, states: InitialStates) -> Batch:
        return Batch(torch.ones(states.trainer.batches.micro_batch, 6, dtype=torch.int64), None)

    def passes(self, states: InitialStates) -> list[CarriedStates]:
        """The states of each micro-batch, as the model gets them."""
        numbers = range(states.trainer.batches.accumulation)
        return [states.model_inputs(number, self.batch(states))["states"] for number in numbers]

    def starts(self, states: InitialStates, layer: int) -> Tensor:
        """[64, H, K, V]: the states that the rows start from."""
        return torch.cat([part.layers[layer].recurrent_states[0] for part in self.passes(states)])

    def step(self, states: InitialStates, number: int, final: Callable[[int], Tensor]) -> None:
        self.begin(states, number)
        for index, part in enumerate(self.passes(states)):
            for layer in range(2):
                part.update_recurrent_state(final(layer).expand(part.rows, -1, -1, -1), layer)
            states.after_backward(index)

    def test_fitted_noise_has_the_moments_of_each_head(self):
        states = self.made("noise")
        draw = torch.Generator().manual_seed(0)
        means = torch.tensor([[1.0, -2.0], [0.0, 5.0]])  # by layer and head
        deviations = torch.tensor([[0.1, 1.0], [2.0, 0.5]])

        def final(layer: int, shift: float) -> Tensor:
            return (
                shift
                + means[layer, :, None, None]
                + deviations[layer, :, None, None] * torch.randn(2, 2, 8, 16, generator=draw)
            )

        self.begin(states, 0)
        assert not self.starts(states, 0).any()  # nothing was seen yet
        for number in range(3):
            self.step(states, number, partial(final, shift=3.0 if number == 0 else 0.0))
        self.begin(states, 3)
        first = 0.99**2 / (0.99**2 + 0.99 + 1)  # weight of the first step
        for layer in range(2):
            found = self.starts(states, layer)
            torch.testing.assert_close(found.mean((0, 2, 3)), means[layer] + 3 * first, rtol=0, atol=0.1)
            deviation = (deviations[layer].square() + 9 * first * (1 - first)).sqrt()
            torch.testing.assert_close(found.std((0, 2, 3)), deviation, rtol=0.05, atol=0)
        before = self.starts(states, 0)
        self.begin(states, 4)
        assert not torch.allclose(before, self.starts(states, 0))
        self.begin(states, 3)
        assert torch.equal(before, self.starts(states, 0))  # a function of the step

    def test_scaled_noise_and_the_share_of_zeros(self):
        whole, by_four = (self.made("noise", 0.5, 0.25, micro_batch) for micro_batch in (2, 4))
        shares = []
        for number in range(20):
            self.begin(whole, number)
            found = self.starts(whole, 1)
            zero = ~found.flatten(1).any(1)
            shares.append(zero.float().mean())
            assert found[~zero].std().item() == pytest.approx(0.5, rel=0.05)
        assert torch.stack(shares).mean().item() == pytest.approx(0.25, abs=0.05)
        self.begin(by_four, 19)
        assert torch.equal(self.starts(by_four, 1), found)  # whatever the micro-batches

    def test_a_lost_row_starts_from_zero(self):
        states = self.made("passing")

        def final(layer: int) -> Tensor:
            state = torch.ones(2, 2, 8, 16)
            if layer:
                state[1, 0, 0, 0] = torch.nan  # of one row of each micro-batch, in one layer
            return state

        self.step(states, 0, final)
        self.begin(states, 1)
        for layer in range(2):
            assert (
                self.starts(states, layer).flatten(1).sum(1).sort().values.tolist() == [0] * 32 + [256] * 32
            )


STATELESS = """
from torch import nn
class Mean(nn.Module):
    def __init__(self, config, layer_index):
        super().__init__()
    def forward(self, x, context=None):
        return x.cumsum(1)
class Sum(Mean):
    def forward(self, x, context=None, cache=None):
        return x.cumsum(1)
"""


def test_a_mixer_of_ones_own_needs_states(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "stateless_mixers.py").write_text(STATELESS)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["launch.device=cpu", "trainer.initial_state=passing"]
    with pytest.raises(ValueError, match="stateless_mixers:Mean"):
        resolve(make_config(*common, "model.mixer=stateless_mixers:Mean"))
    resolve(make_config(*common, "model.mixer=stateless_mixers:Sum"))
    with pytest.raises(ValueError, match=r"data\.document_boundaries"):
        resolve(make_config(*common, "model.mixer=stateless_mixers:Sum", "data.document_boundaries=true"))
