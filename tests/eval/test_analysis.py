"""The scripts of scripts/analysis against recurrences, the operator, and models with known transitions."""

import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch

from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.kernels.delta_product import delta_product
from fla_train.tasks.group_words import GroupWords
from tests.eval.test_expressivity import TASK
from tests.tasks.constructions import symmetric

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts/analysis"))

from remembrance import effective_remembrance
from transitions import Transitions, transitions
from transitions import main as draw_transitions


def test_a_permutation_model_has_permutation_matrices(tmp_path: Path) -> None:
    task = GroupWords("S3", 64)
    kept = torch.as_tensor(task.elements)
    (layer,) = transitions(symmetric(3), task.batch(range(8)).input_ids, kept)
    assert layer.tokens.tolist() == list(range(6))
    for images, matrix in zip(permutations(range(3)), layer.matrices()[:, 0], strict=True):
        expected = torch.zeros(3, 3, dtype=torch.float64)
        for i, image in enumerate(images):
            expected[image, i] = 1
        torch.testing.assert_close(matrix, expected, atol=1e-4, rtol=0)  # the norm's epsilon
    assert 1 < layer.effective_dimension().item() <= 3
    export_model(symmetric(3).float(), None, tmp_path / "model", CardInfo(config=TASK))
    draw_transitions(str(tmp_path / "model"), tmp_path / "figures")
    assert (tmp_path / "figures/layer-0.svg").is_file()


def test_matrices_are_what_the_operator_does_to_a_state() -> None:
    torch.manual_seed(0)
    steps, heads, size = 3, 2, 4
    keys = torch.nn.functional.normalize(torch.randn(5, steps, heads, size, dtype=torch.float64), dim=-1)
    beta = 2 * torch.rand(5, steps, heads, dtype=torch.float64)
    decay = torch.rand(5, heads, dtype=torch.float64)
    layer = Transitions(torch.arange(5), beta, keys, decay)
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


@torch.no_grad()
def test_remembrance_against_single_passes(build_model) -> None:
    model = build_model(initializer_range=0.3).double().eval()
    document = np.random.default_rng(0).integers(3, 320, 40).tolist()

    def probabilities(ids: list[int]) -> torch.Tensor:
        return model(torch.tensor([[2, *ids]])).logits[0, -1].softmax(-1)

    found = effective_remembrance(model, [document], [1, 8, 40], prefix=[2])
    expected = [(probabilities(document) - probabilities(document[-n:])).abs().sum() / 2 for n in (1, 8, 40)]
    assert found[0].tolist() == pytest.approx([float(x) for x in expected], abs=1e-9) and found[0, 2] == 0
