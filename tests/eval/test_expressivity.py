"""The expressivity suite on models whose transitions are known, because their weights were set by hand."""

import json
from itertools import permutations
from pathlib import Path

import pytest
import torch

from fla_train.eval import expressivity
from fla_train.eval.config import EvalConfig, ExpressivityConfig, SuiteConfig
from fla_train.eval.expressivity import evaluate_expressivity
from fla_train.eval.expressivity_figures import draw_spread_ratio
from fla_train.eval.transitions import Transitions, transitions
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.kernels.delta_product import delta_product
from fla_train.tasks import GroupWords
from fla_train.utils.keys import find_errors
from tests.tasks.constructions import cyclic, symmetric

TASK = """\
task:
  kind: group_words
  options: {group: S3}
  train: {length: 16}
  tests: {train_length: {length: 16}}
  train_sequences: null
  test_sequences: 8
  batch_size: 4
  test_batch_size: 4
"""


def read(model, group: str) -> Transitions:
    task = GroupWords(group, 64)
    (layer,) = transitions(model, task.batch(range(8)).input_ids)
    return layer.only(task.elements.tolist())


def test_a_permutation_model_has_permutation_matrices() -> None:
    layer = read(symmetric(3), "S3")
    assert layer.tokens.tolist() == list(range(6))
    for images, matrix in zip(permutations(range(3)), layer.matrices()[:, 0], strict=True):
        expected = torch.zeros(3, 3, dtype=torch.float64)
        for i, image in enumerate(images):
            expected[image, i] = 1
        torch.testing.assert_close(matrix, expected, atol=1e-4, rtol=0)  # the norm's epsilon
    assert layer.beta_spread.max() == 0
    assert layer.beta[0].max() == 0 and sorted(layer.beta[3, :, 0].tolist()) == [2, 2]

    values = layer.eigenvalues()
    third = torch.exp(torch.tensor(2j * torch.pi / 3, dtype=torch.complex128))
    for cycle in (3, 4):
        found = sorted(values[cycle, 0].tolist(), key=lambda value: value.imag)
        for a, b in zip(found, (third.conj().item(), 1.0, third.item()), strict=True):
            assert abs(a - b) < 1e-4


def test_keys_of_rotations_lie_in_a_plane() -> None:
    layer = read(cyclic(7), "Z7")
    shares = layer.explained_variance()
    assert shares.shape == (1, 2) and shares.sum() == pytest.approx(1)
    assert 1 < layer.effective_dimension().item() <= 2


def test_matrices_are_what_the_operator_does_to_a_state() -> None:
    torch.manual_seed(0)
    steps, heads, size = 3, 2, 4
    keys = torch.nn.functional.normalize(torch.randn(5, steps, heads, size, dtype=torch.float64), dim=-1)
    beta = 2 * torch.rand(5, steps, heads, dtype=torch.float64)
    decay = torch.rand(5, heads, dtype=torch.float64)
    layer = Transitions(torch.arange(5), beta, torch.zeros_like(beta), keys, decay)
    state = torch.randn(5, heads, size, 3, dtype=torch.float64)
    _, after = delta_product(
        torch.zeros(5, 1, heads, size, dtype=torch.float64),
        keys[:, None],
        torch.zeros(5, 1, steps, heads, 3, dtype=torch.float64),
        beta[:, None],
        decay.log()[:, None],
        initial_state=state,
        output_final_state=True,
        backend="recurrent",
    )
    torch.testing.assert_close(layer.matrices() @ state, after)
    assert torch.allclose(layer.matrices()[2, 1], torch.linalg.multi_dot([
        decay[2, 1] * torch.eye(size, dtype=torch.float64),
        *(torch.eye(size, dtype=torch.float64) - beta[2, j, 1] * torch.outer(keys[2, j, 1], keys[2, j, 1])
          for j in (2, 1, 0)),
    ]))  # fmt: skip


def test_the_suite_reports_a_solved_task(tmp_path: Path) -> None:
    export = tmp_path / "run" / "hf" / "step-0000001"
    export_model(symmetric(3).float(), None, export, CardInfo(config=TASK))
    config = EvalConfig(
        checkpoint=str(tmp_path / "run"),
        output=str(tmp_path / "report"),
        device="cpu",
        suite=SuiteConfig(
            name="expressivity",
            expressivity=ExpressivityConfig(lengths=[100], sequences=12, batch_size=8, contexts=4),
        ),
    )
    folder, _ = evaluate_expressivity(config)
    results = json.loads((folder / "results.json").read_text())
    assert results["accuracy"]["length_100"]["sequence_accuracy"] == 1.0
    assert len(results["curves"]["length_100"]["y"]) == 100
    (layer,) = results["layers"]
    assert layer["share_of_tokens_that_rotate"] == [pytest.approx(2 / 6)]
    assert layer["smallest_real_part"] == [pytest.approx(-1, abs=1e-4)]
    assert "| length_100 | sequence accuracy | 1.0000 |" in (folder / "table.md").read_text()
    assert set(results["spread_ratio"]) == {"length_100"}  # longer than in training
    assert results["spread_ratio"]["length_100"]["accuracy"][-1] == 1.0
    assert results["spread_ratio"]["length_100"]["measured_length"] is None
    names = {"accuracy", "spread_ratio", "betas-layer-0", "keys-layer-0", "eigenvalues-layer-0"}
    assert {path.stem for path in folder.glob("*.png")} == names


@pytest.mark.parametrize("ratio", [[0.0, 0.0], [None, None], [0.0, 0.5]])
def test_ratios_that_are_zero_or_missing_are_drawn(tmp_path: Path, ratio: list[float | None]) -> None:
    report = {"lengths": [1, 2], "ratio": ratio, "accuracy": [1.0, 0.5], "threshold": None}
    draw_spread_ratio({"longer": report | {"predicted_length": None}}, tmp_path)
    assert (tmp_path / "spread_ratio.png").is_file()


def test_a_model_is_named_from_within_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = []
    monkeypatch.setattr(expressivity, "plot_accuracy", lambda curves, title, out: titles.append(title))
    monkeypatch.setattr(expressivity, "draw_transitions", lambda *given: None)
    suite = SuiteConfig(name="expressivity", expressivity=ExpressivityConfig(sequences=2, contexts=2))
    for name in ("alone", "run/hf/step-0000001"):
        export = export_model(symmetric(3).float(), None, tmp_path / name, CardInfo(config=TASK))
        monkeypatch.chdir(export)
        folder, _ = evaluate_expressivity(EvalConfig(checkpoint=".", device="cpu", suite=suite))
        titles.append(folder.parent)
    assert titles == ["alone", Path("evaluations/alone"), "run", tmp_path / "run/eval"]


def test_a_language_model_is_refused(tmp_path: Path) -> None:
    export_model(cyclic(3).float(), None, tmp_path / "model", CardInfo(config="seed: 0\n"))
    suite = SuiteConfig(name="expressivity", expressivity=ExpressivityConfig())
    with pytest.raises(ValueError, match="was not trained on a task"):
        evaluate_expressivity(EvalConfig(checkpoint=str(tmp_path / "model"), device="cpu", suite=suite))


def test_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    suite = SuiteConfig(name="expressivity", expressivity=ExpressivityConfig())
    with pytest.raises(ValueError, match="without torchrun"):
        evaluate_expressivity(EvalConfig(checkpoint="anything", suite=suite))


def test_errors() -> None:
    suite = SuiteConfig(name="x", tasks=["piqa"], expressivity=ExpressivityConfig(lengths=[0], sequences=0))
    text = "\n".join(find_errors(suite, "suite."))
    assert "sequences=0" in text and "lengths=0" in text and "runs alone" in text
