"""Models whose weights are set by hand to solve word problems: the papers' existence proofs, made runnable.

Inputs are one-hot embeddings, so each projection is a table over tokens. A key may point anywhere, although
it passes SiLU: SiLU takes every value in [-0.25, 0.25], and keys are normalised afterwards. v = 0 except at
the beginning of sequence, whose keys and values write the initial state. beta is exactly 2, 1 or 0.
"""

import math

import torch
from torch import Tensor

from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.tasks.groups import make_group

BETA_LOGITS = {2: 1e3, 1: 0.0, 0: -1e3}  # 2 sigmoid(logit)


def blank_model(tokens: int, width: int, **settings: int) -> DeltaProductForCausalLM:
    """An fp64 model, all weights 0 but the norms'; one-hot embeddings in the first `tokens` channels."""
    config = DeltaProductConfig(
        vocab_size=tokens, hidden_size=width, use_short_conv=False, norm_eps=1e-12, **settings
    )
    model = DeltaProductForCausalLM(config).double().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.zero_()
    model.model.embeddings.weight[:, :tokens] = torch.eye(tokens)
    return model


def before_silu(values: Tensor) -> Tensor:
    """x >= -1 with silu(x) = values, by bisection; values in [-0.25, 1]."""
    low, high = torch.full_like(values, -1.0), torch.full_like(values, 2.0)
    for _ in range(80):
        middle = (low + high) / 2
        below = torch.nn.functional.silu(middle) < values
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def direction(angle: float) -> Tensor:
    """[2] fp64."""
    return torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)


def one_layer(group: str, transitions: list[list[Tensor]], start: list[Tensor], query: Tensor):
    """One DeltaProduct layer of one head, whose transition at element x is the product of reflections.

    Args:
        transitions: for each element the normals [K] of its reflections, applied in order; at most n_h.
        start: n_h orthonormal vectors [K], the columns of the initial state.
        query: [K], what the state is read with. Reading must tell the elements' states apart.
    """
    order, steps, size = make_group(group).order, len(start), len(query)
    tokens = order + 2  # the filler and the beginning of sequence follow the elements
    width = tokens + steps
    model = blank_model(
        tokens, width, num_hidden_layers=1, num_heads=1, head_dim=size, expand_v=steps / size,
        num_householder=steps, intermediate_size=1,
    )  # fmt: skip
    mixer = model.model.layers[0].attn
    keys = torch.ones(steps, size, tokens, dtype=torch.float64) / 4  # a key with beta = 0 is idle
    betas = torch.full((steps, tokens), BETA_LOGITS[0], dtype=torch.float64)
    values = torch.zeros(steps, steps, tokens, dtype=torch.float64)
    for element, normals in enumerate(transitions):
        for j, normal in enumerate(normals):
            keys[j, :, element] = before_silu(normal / normal.norm() / 4)
            betas[j, element] = BETA_LOGITS[2]
    for j, column in enumerate(start):
        keys[j, :, -1] = before_silu(column / 4)
        betas[j, -1] = BETA_LOGITS[1]
        values[j, j, -1] = 1.0
    scale = math.sqrt(width)  # what the norm makes of a one-hot vector
    mixer.k_proj.weight[:, :tokens] = keys.flatten(0, 1) / scale
    mixer.v_proj.weight[:, :tokens] = values.flatten(0, 1) / scale
    mixer.b_proj.weight[:, :tokens] = betas / scale
    mixer.q_proj.weight[:, :tokens] = before_silu(query / query.norm() / 4)[:, None] / scale
    mixer.o_proj.weight[tokens:] = torch.eye(steps)

    for element, normals in enumerate(transitions):  # the head: the state of each element, read and normed
        state = torch.stack(start, dim=1)
        for normal in normals:
            unit = normal / normal.norm()
            state = state - 2 * unit[:, None] * (unit @ state)
        read = state.T @ query
        model.lm_head.weight[element, tokens:] = read / read.norm()
    return model


def cyclic(m: int) -> DeltaProductForCausalLM:
    """Z_m by rotations, two reflections each (arXiv 2411.12537, Theorem 3)."""
    turns = [[direction(0.0), direction(math.pi * i / m)] if i else [] for i in range(m)]
    return one_layer(f"Z{m}", turns, [direction(0.0), direction(math.pi / 2)], direction(0.0))


def symmetric(n: int) -> DeltaProductForCausalLM:
    """S_n by permutation matrices, at most n - 1 swaps each (arXiv 2411.12537, Theorem 3)."""
    from itertools import permutations

    unit = torch.eye(n, dtype=torch.float64)
    transitions = []
    for images in permutations(range(n)):  # the group's own order
        current, normals = list(range(n)), []
        for i in range(n):  # swap the labels until i is sent where it belongs
            if current[i] != images[i]:
                a, b = current[i], images[i]
                normals.append(unit[a] - unit[b])
                current = [b if c == a else a if c == b else c for c in current]
        transitions.append(normals)
    # Orthogonal to (1, ..., 1), which no permutation moves: all that is read is reflected equally often, so
    # that what a reflection falls short of beta |k|^2 = 2 by the norm's epsilon leaves its direction alone.
    query = torch.arange(n, dtype=torch.float64) ** 1.5
    query -= query.mean()
    return one_layer(f"S{n}", transitions, list(unit[: n - 1]), query)


def two_layers(group: str) -> DeltaProductForCausalLM:
    """Z_m or D_m by two DeltaNet layers (arXiv 2411.12537, Theorem 6; arXiv 2502.10297, Theorem 1).

    The first layer's heads 0 and 1 keep the parities of rotations and reflections as signs, and its MLP makes
    (token, parity of rotations) one-hot. That picks a reflection in the plane for the second layer, whose
    state runs over 2m points of a circle. The norm of a head with one value leaves a sign, so the m heads of
    the second layer say on which side of m lines the state lies, which is enough to know it. The last MLP
    looks up the element.
    """
    m, order = int(group[1:]), make_group(group).order
    tokens, configurations = order + 2, [(point, sign) for point in range(2 * m) for sign in (1, -1)]
    rotation_sign, reflection_sign = tokens, tokens + 1  # channels
    pairs = tokens + 2  # 2 * tokens channels: (token, even), then (token, odd)
    sides = pairs + 2 * tokens  # m channels
    found = sides + m  # order channels
    width = found + order
    model = blank_model(
        tokens, width, num_hidden_layers=2, num_heads=m, head_dim=2, expand_v=0.5, num_householder=1,
        intermediate_size=max(2 * tokens, len(configurations)),
    )  # fmt: skip
    first, second = model.model.layers
    identity = torch.eye(tokens, dtype=torch.float64)

    scale = math.sqrt(width)
    rotations = torch.tensor([x < m for x in range(order)])
    logits = torch.full((m, tokens), BETA_LOGITS[0], dtype=torch.float64)
    logits[0, :order] = torch.where(rotations, BETA_LOGITS[2], BETA_LOGITS[0])
    logits[1, :order] = torch.where(rotations, BETA_LOGITS[0], BETA_LOGITS[2])
    logits[:, -1] = BETA_LOGITS[1]
    first.attn.b_proj.weight[:, :tokens] = logits / scale
    first.attn.k_proj.weight[::2, :tokens] = 1.0  # every key is (1, 0)
    first.attn.q_proj.weight[::2, :tokens] = 1.0
    first.attn.v_proj.weight[:2, tokens - 1] = 1.0
    first.attn.o_proj.weight[rotation_sign, 0] = first.attn.o_proj.weight[reflection_sign, 1] = 1.0

    scale = math.sqrt(width / 3)  # one-hot and two signs
    for half, sign in enumerate((1.0, -1.0)):
        rows = slice(half * tokens, (half + 1) * tokens)
        first.mlp.gate_proj.weight[rows, :tokens] = identity / scale
        first.mlp.up_proj.weight[rows, :tokens] = 0.5 / scale
        first.mlp.up_proj.weight[rows, rotation_sign] = sign * 0.5 / scale
        down = identity / torch.nn.functional.silu(torch.tensor(1.0, dtype=torch.float64))
        first.mlp.down_proj.weight[pairs + half * tokens : pairs + (half + 1) * tokens, rows] = down

    scale = math.sqrt(width / 4)  # one-hot, two signs and the pair
    keys = torch.zeros(2, 2 * tokens, dtype=torch.float64)
    for x in range(order):
        i = x % m
        # The angles theta(x, parity) in units of pi / m. Appendix B of arXiv 2502.10297 gives those of the
        # reflections the other way round, but a reflection leaves the parity as it is: it finds a state d
        # where rotations are even.
        even, odd = (1 + 2 * i, 1 - 2 * i) if x < m else (-2 * i, 2 + 2 * i)
        for column, theta in ((x, even), (tokens + x, odd)):
            keys[:, column] = before_silu(direction((theta * math.pi / m + math.pi) / 2) / 4)
    keys[0, tokens - 1] = 1.0  # the beginning of sequence has read no rotation: even
    second.attn.k_proj.weight[:, pairs:sides] = keys.repeat(m, 1) / scale
    logits = torch.full((tokens,), BETA_LOGITS[2], dtype=torch.float64)
    logits[-1] = BETA_LOGITS[1]
    second.attn.b_proj.weight[:, :tokens] = logits / scale
    second.attn.v_proj.weight[:, tokens - 1] = 1.0
    normals = [direction(math.pi / 2 + (j + 0.5) * math.pi / m) for j in range(m)]
    queries = before_silu(torch.cat(normals) / 4) / scale
    second.attn.q_proj.weight[:, :tokens] = queries[:, None]
    second.attn.o_proj.weight[sides:found] = torch.eye(m)

    scale = math.sqrt(width / (4 + m))
    for row, (point, sign) in enumerate(configurations):
        signs = torch.stack(normals) @ direction(point * math.pi / m)
        # 1 if all m + 1 signs agree, and below 0 if not
        second.mlp.gate_proj.weight[row, sides:found] = 100 * signs.sign() / scale
        second.mlp.gate_proj.weight[row, reflection_sign] = 100 * sign / scale
        second.mlp.gate_proj.weight[row, :tokens] = -100 * m / scale
        second.mlp.up_proj.weight[row, :tokens] = 1.0
        # d_i lies at 2i, c_i at 1 - 2i (times pi / m, mod 2m)
        i = point // 2 if point % 2 == 0 else (1 - point) // 2 % m
        element = i % m if sign == 1 else m + (m - i) % m
        if element < order:
            second.mlp.down_proj.weight[found + element, row] = 1.0
    model.lm_head.weight[:order, found:] = torch.eye(order)
    return model
