"""The algebra that the fast backends rest on, each identity against the step recurrence in float64, one head.

A failure here means that a formula is wrong, not its implementation.
"""

import pytest
import torch
from torch import Tensor

from fla_train.kernels.delta_product import delta_product

TOKENS, KEY_DIM, VALUE_DIM = 8, 7, 5
EVERY_N = pytest.mark.parametrize("num_householder", [1, 2, 3, 4])


class Chunk:
    """One chunk, every matrix of the chunk form written out; TOKENS * N rows, row r in token of[r]."""

    def __init__(self, num_householder: int):
        torch.manual_seed(num_householder)
        rows = TOKENS * num_householder
        self.q = torch.randn(TOKENS, KEY_DIM, dtype=torch.float64)
        self.k = torch.nn.functional.normalize(torch.randn(rows, KEY_DIM, dtype=torch.float64), dim=-1)
        self.v = torch.randn(rows, VALUE_DIM, dtype=torch.float64)
        self.beta = 0.05 + 1.95 * torch.rand(rows, 1, dtype=torch.float64)
        self.g = -1.5 * torch.rand(TOKENS, dtype=torch.float64)
        self.S = torch.randn(KEY_DIM, VALUE_DIM, dtype=torch.float64)
        self.num_householder = num_householder
        self.of = torch.arange(rows) // num_householder
        self.leaves = [self.q, self.k, self.v, self.beta, self.g, self.S]
        for x in self.leaves:
            x.requires_grad_()

    @property
    def total(self) -> Tensor:
        return self.g.cumsum(0)

    def step_recurrence(self) -> tuple[Tensor, Tensor]:
        shape = (1, TOKENS, self.num_householder, 1, -1)
        o, state = delta_product(
            self.q[None, :, None],
            self.k.view(shape),
            self.v.view(shape),
            self.beta.view(shape[:-1]),
            self.g[None, :, None],
            scale=1.0,
            initial_state=self.S[None, None],
            output_final_state=True,
            backend="recurrent",
        )
        return o[0, :, 0], state[0, 0]

    def inverse(self) -> Tensor:
        """(I + tril(diag(beta) K K^T * decay, -1))^-1."""
        total = self.total[self.of]
        decay = (total[:, None] - total[None, :]).clamp(max=0).exp()
        system = (self.beta * (self.k @ self.k.T) * decay).tril(-1)
        return torch.linalg.inv(torch.eye(len(system), dtype=system.dtype) + system)

    def chunk_form(self) -> tuple[Tensor, Tensor, Tensor]:
        """o, the next state, and U, the rows that are written."""
        total, by_row = self.total, self.total[self.of]
        U = self.inverse() @ (self.beta * (self.v - by_row.exp()[:, None] * (self.k @ self.S)))
        decay = torch.where(
            self.of[None, :] <= torch.arange(TOKENS)[:, None],
            (total[:, None] - by_row[None, :]).clamp(max=0).exp(),
            0.0,
        )
        o = total.exp()[:, None] * (self.q @ self.S) + ((self.q @ self.k.T) * decay) @ U
        state = total[-1].exp() * self.S + self.k.T @ ((total[-1] - by_row).exp()[:, None] * U)
        return o, state, U


@EVERY_N
def test_chunk_form(num_householder):
    chunk = Chunk(num_householder)
    expected_o, expected_state = chunk.step_recurrence()
    o, state, _ = chunk.chunk_form()
    torch.testing.assert_close(o, expected_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-12, atol=1e-12)


@EVERY_N
def test_a_query_is_a_step_that_reads_and_does_not_write(num_householder):
    """Rows (k_1 .. k_n, q) per token, the query's of value 0; its row of the solution is minus the output."""
    chunk = Chunk(num_householder)
    per_token = num_householder + 1
    is_query = torch.arange(TOKENS * per_token) % per_token == num_householder

    def interleave(rows: Tensor, query: Tensor) -> Tensor:
        return torch.cat([rows.view(TOKENS, num_householder, -1), query.view(TOKENS, 1, -1)], 1).flatten(0, 1)

    X = interleave(chunk.k, chunk.q)
    values = interleave(chunk.v, torch.zeros(TOKENS, VALUE_DIM, dtype=torch.float64))
    reads = interleave(chunk.beta, torch.ones(TOKENS, 1, dtype=torch.float64))
    total = chunk.total.repeat_interleave(per_token)
    decay = (total[:, None] - total[None, :]).clamp(max=0).exp()
    system = (reads * (X @ X.T) * decay).tril(-1).masked_fill(is_query, 0.0)  # a query writes nothing
    system = system + torch.eye(len(system), dtype=system.dtype)
    Z = torch.linalg.solve(system, reads * (values - total.exp()[:, None] * (X @ chunk.S)))
    written = Z.masked_fill(is_query[:, None], 0.0)
    state = total[-1].exp() * chunk.S + X.T @ ((total[-1] - total).exp()[:, None] * written)

    expected_o, expected_state = chunk.step_recurrence()
    torch.testing.assert_close(-Z[is_query], expected_o, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, expected_state, rtol=1e-12, atol=1e-12)


@EVERY_N
def test_a_chunk_is_an_affine_map_of_its_state(num_householder):
    """S' = Phi S + B with Phi [K, K] and B [K, V] free of S: what makes the states a scan."""
    chunk = Chunk(num_householder)
    by_row = chunk.total[chunk.of]
    mixed = chunk.inverse() * chunk.beta.T
    written = chunk.k.T * (chunk.total[-1] - by_row).exp()
    Phi = chunk.total[-1].exp() * torch.eye(KEY_DIM, dtype=torch.float64)
    Phi = Phi - written @ mixed @ (by_row.exp()[:, None] * chunk.k)
    B = written @ mixed @ chunk.v
    torch.testing.assert_close(Phi @ chunk.S + B, chunk.step_recurrence()[1], rtol=1e-12, atol=1e-12)
    assert (
        torch.linalg.matrix_norm(Phi.detach(), 2) <= 1 + 1e-12
    )  # contractions, for beta in [0, 2] and |k| = 1


@EVERY_N
def test_the_inverse_is_bounded_by_the_step_size(num_householder):
    """|T_rs| <= beta_r off the diagonal, so it fits any float format; powers of the matrix do not."""
    chunk = Chunk(num_householder)
    off_diagonal = chunk.inverse().detach().tril(-1).abs()
    assert (off_diagonal <= chunk.beta.detach() * (1 + 1e-12)).all()


@EVERY_N
def test_gradient_of_the_gate_from_those_of_queries_and_values(num_householder):
    """dg_t = sum over later tokens of (q.dq - v.dv), plus <dS', S'>."""
    chunk = Chunk(num_householder)
    o, state = chunk.step_recurrence()
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    dq, _, dv, _, dg, _ = torch.autograd.grad([o, state], chunk.leaves, [d_o, d_state])
    by_token = (chunk.q * dq).sum(-1) - (chunk.v * dv).sum(-1).view(TOKENS, num_householder).sum(-1)
    later = by_token.flip(0).cumsum(0).flip(0)
    torch.testing.assert_close(later + (d_state * state).sum(), dg, rtol=1e-11, atol=1e-11)


@EVERY_N
def test_gradients_of_values_and_step_sizes_from_one_adjoint_solve(num_householder):
    """dY = T^T dU; dv = beta dY; dbeta = rowsum(dY * U) / beta, or from the errors X without division."""
    chunk = Chunk(num_householder)
    o, state, U = chunk.chunk_form()
    d_o, d_state = torch.randn_like(o), torch.randn_like(state)
    _, _, dv, d_beta, _, _ = torch.autograd.grad([o, state], chunk.leaves, [d_o, d_state], retain_graph=True)
    (dU,) = torch.autograd.grad([o, state], U, [d_o, d_state])
    dY = chunk.inverse().T @ dU
    torch.testing.assert_close(chunk.beta * dY, dv, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close((dY * U).sum(-1, keepdim=True) / chunk.beta, d_beta, rtol=1e-9, atol=1e-10)

    total = chunk.total[chunk.of]
    decay = (total[:, None] - total[None, :]).clamp(max=0).exp()
    A = ((chunk.k @ chunk.k.T) * decay).tril(-1)
    X = torch.linalg.solve(
        torch.eye(len(A), dtype=A.dtype) + A * chunk.beta.T,
        chunk.v - total.exp()[:, None] * (chunk.k @ chunk.S),
    )
    torch.testing.assert_close(chunk.beta * X, U, rtol=1e-11, atol=1e-11)
    dA_beta = -(dv @ X.T).tril(-1)
    exact = (dU * X).sum(-1, keepdim=True) + (A * dA_beta).sum(0)[:, None]
    torch.testing.assert_close(exact, d_beta, rtol=1e-11, atol=1e-11)
