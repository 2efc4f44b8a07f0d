"""Launch options of the chunk kernels, the rows of `launch_table`.

K = V = 128 and 256 timed on an H100 (torch 2.11, Triton 3.6); K = 64 follows the same rules, and
n_h = 3 and 4 gave no gain on an H200. Hopper's backward kernel with K other than V is faster on an H100 than
Triton's two (docs/dev/log.md).

Rows of 8.0 (A100) and 10.0 (B200) were never timed: of a few candidates that Triton 3.6 and 3.9 compile they
spill the fewest registers (docs/dev/kernels.md). `fla-bench tune` finds better ones on such a machine.
"""

# Options for Hopper with keys up to 128, except `chunk_bwd_qkg`, whose options depend on K, V and n_h.
HOPPER = {
    "chunk_prepare_wy": {"gluon": 1, "num_warps": 4, "maxnreg": 168},
    "chunk_fwd": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "chunk_bwd_state": {"gluon": 1, "BV": 64, "num_warps": 4, "num_stages": 2},
}
HOPPER_BWD_QKG = {
    (64, 64, 1): {"gluon": 1, "BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 3},
    (64, 128, 1): {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 3},
    (64, 128, 2): {"BV": 128, "BKO": 64, "num_warps": 4, "num_stages": 1},
    (64, 192, 1): {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 1},
    (64, 192, 2): {"BV": 128, "BKO": 64, "num_warps": 4, "num_stages": 1},
    (128, 64, 1): {"BV": 64, "BKO": 128, "num_warps": 8, "num_stages": 3},
    (128, 128, 1): {"gluon": 1, "BV": 64, "BKO": 128, "num_warps": 8, "num_stages": 3},
    (128, 128, 2): {"gluon": 1, "BV": 128, "BKO": 128, "num_warps": 4, "num_stages": 1},
    (128, 192, 1): {"BV": 64, "BKO": 128, "num_warps": 8, "num_stages": 1},
    (128, 192, 2): {"BV": 128, "BKO": 128, "num_warps": 4, "num_stages": 1},
}
HOPPER_WIDE = {
    "chunk_prepare_wy": {"num_warps": 4, "maxnreg": 168},
    "chunk_fwd": {"BV": 128, "num_warps": 8, "num_stages": 2},
    "chunk_bwd_state": {"BV": 128, "num_warps": 8, "num_stages": 2},
    "chunk_bwd_qkg": {"gluon": 1, "BV": 64, "BKO": 256, "num_warps": 8, "num_stages": 2},
}
UNTIMED = {
    "chunk_prepare_wy": {"num_warps": 8, "num_stages": 1},
    "chunk_fwd": {"BV": 64, "num_warps": 8, "num_stages": 1},
    "chunk_bwd_state": {"BV": 64, "num_warps": 8, "num_stages": 2},
    "chunk_bwd_qkg": {"BV": 64, "BKO": 64, "num_warps": 8, "num_stages": 1},
}


def _row(architecture: str, key_dim: int, value_dim: int, num_householder: int, kernels: dict) -> dict:
    sizes = {"key_dim": key_dim, "value_dim": value_dim, "num_householder": num_householder}
    return {"architecture": architecture, **sizes, **kernels}


ROWS = [
    *(_row("9.0", *sizes, HOPPER | {"chunk_bwd_qkg": qkg}) for sizes, qkg in HOPPER_BWD_QKG.items()),
    *(_row("9.0", 256, 256, num_householder, HOPPER_WIDE) for num_householder in (1, 2)),
    _row("8.0", 128, 128, 1, UNTIMED),
    _row("10.0", 128, 128, 1, UNTIMED | {"chunk_fwd": {"BV": 64, "num_warps": 8, "num_stages": 2}}),
]
