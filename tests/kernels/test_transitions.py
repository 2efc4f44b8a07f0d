"""The operator's products of Householder steps: proposition 1 of arXiv 2411.12537, lemma 1 of 2502.10297.

With v = 0, the final state of one token that starts from the unit matrix is the token's transition.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from fla_train.kernels.delta_product import delta_product

SIZE, STEPS = 4, 8
UNIT = torch.eye(SIZE, dtype=torch.float64)
pytestmark = pytest.mark.parametrize("backend", ["recurrent", "chunk"])


def transition(keys: Tensor, beta: Tensor, backend: str) -> Tensor:
    """prod_j (I - beta_j k_j k_j^T) of keys [N, K] and beta [N], the first step rightmost."""
    k, v = keys[None, None, :, None], torch.zeros(1, 1, len(keys), 1, SIZE, dtype=torch.float64)
    q, start = torch.zeros(1, 1, 1, SIZE, dtype=torch.float64), UNIT[None, None]
    options = {"initial_state": start, "output_final_state": True, "backend": backend}
    return delta_product(q, k, v, beta[None, None, :, None], **options)[1][0, 0]


def reflections(matrix: Tensor) -> Tensor:
    """Normals of at most n reflections whose product, in the operator's order, is an orthogonal [n, n]."""
    normals = []
    for column in range(SIZE):
        normal = matrix[:, column] - UNIT[:, column]
        if normal.norm() > 1e-9:
            normals.append(normalize(normal, dim=0))
            matrix = matrix - 2 * torch.outer(normals[-1], normals[-1] @ matrix)
    return torch.stack(normals[::-1]) if normals else torch.empty(0, SIZE, dtype=torch.float64)


def random_steps(count: int, most: float) -> tuple[Tensor, Tensor]:
    return normalize(torch.randn(count, SIZE).double(), dim=1), most * torch.rand(count).double()


def test_contractions_are_products_of_three_n_steps_and_products_are_contractions(backend: str):
    assert torch.linalg.matrix_norm(transition(*random_steps(STEPS, 2.0), backend), 2) <= 1 + 1e-12
    u, s, vt = torch.linalg.svd(torch.randn(SIZE, SIZE).double())
    first, last = reflections(vt), reflections(u)
    keys = torch.cat([first, UNIT, last])
    beta = torch.cat([torch.full((len(first),), 2.0), 1 - s / s[0], torch.full((len(last),), 2.0)]).double()
    assert len(keys) <= 3 * SIZE
    torch.testing.assert_close(transition(keys, beta, backend), u @ torch.diag(s / s[0]) @ vt)


def test_permutations_need_a_reflection_less_than_they_have_elements(backend: str):
    keys = reflections(UNIT[torch.arange(1, SIZE + 1) % SIZE])
    assert len(keys) == SIZE - 1
    cycle = transition(keys, torch.full((len(keys),), 2.0).double(), backend)
    torch.testing.assert_close(cycle, UNIT[torch.arange(1, SIZE + 1) % SIZE])


@pytest.mark.parametrize(("steps", "real"), [(1, True), (2, True), (3, False)])
def test_two_steps_with_eigenvalues_from_zero_to_one_do_not_rotate_but_three_may(steps, real, backend: str):
    """The proposition says that no number of such steps does. Its proof holds for two."""
    values = [torch.linalg.eigvals(transition(*random_steps(steps, 1.0), backend)) for _ in range(200)]
    assert (max(x.imag.abs().max() for x in values) < 1e-6) == real
    assert all((x.abs() <= 1 + 1e-12).all() for x in values)


def test_steps_along_one_key_are_one_step(backend: str):
    key, beta = random_steps(1, 1.0)[0].expand(STEPS, -1), random_steps(STEPS, 2.0)[1]
    expected = UNIT - (1 - (1 - beta).prod()) * torch.outer(key[0], key[0])
    torch.testing.assert_close(transition(key, beta, backend), expected)
