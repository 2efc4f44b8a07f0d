"""`fla-bench`: how fast the operator and the training step are on this machine, beside their peers.

`fla-bench tune` makes the operator faster on it, `fla-bench precompile` the start of a run.

    fla-bench kernels                                         # the shapes of docs/dev/kernels.md on a GPU
    fla-bench kernels --batch 2 --tokens 1024 --heads 4 --head-dim 64 --num-householder 1 2 --peers
    fla-bench decode --heads 512 2048 --num-householder 1 2          # one token, beside a copy of the states
    fla-bench decode --model gated_delta_product/340m --peers llama-compiled fla   # generate, by context
    fla-bench fused_ops --peers                               # convolution, norms, SwiGLU, gates, loss
    fla-bench attention --tokens 2048 8192 32768              # windows and packed documents by length
    fla-bench tune --head-dim 128 --num-householder 1 2              # launch options for this GPU, to a file
    fla-bench train --peers llama -- model=gated_delta_product/340m trainer.seq_len=2048
    fla-bench precompile --folder /opt/kernels -- model=gated_delta_product/340m data=fineweb

Tables go to stdout in Markdown. `--json X.json` writes everything to that file and what was printed to X.md.
Exit code 2: the request was wrong.
"""

import contextlib
import io
import json
import os
import sys
from collections.abc import Sequence

from fla_train.cli.app import fail, interruptible
from fla_train.cli.bench_options import build_parser


class Tee(io.StringIO):
    """Keep what is printed to stdout, and print it."""

    def __init__(self) -> None:
        super().__init__()
        self.screen = sys.stdout

    def write(self, text: str) -> int:
        """Write `text` to both."""
        self.screen.write(text)
        return super().write(text)

    def flush(self) -> None:
        """Flush the screen."""
        self.screen.flush()


def run(arguments: Sequence[str]) -> None:
    """Measure and print.

    Raises:
        ValueError: a request that cannot be measured.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler prints two lines for each profile
    request = build_parser().parse_args(arguments)
    from fla_train.cli.bench_commands import measure  # imports torch: seconds, which --version does not need

    file = getattr(request, "json", None)
    if file is not None and not file.absolute().parent.is_dir():
        raise ValueError(f"--json {file}: there is no folder {file.parent}: make it first")
    if file is not None and file.is_dir():
        raise ValueError(f"--json {file} is a folder: name a file in it")
    if file is None:
        measure(request)
        return
    with contextlib.redirect_stdout(Tee()) as printed:
        content = measure(request)
    file.with_suffix(".md").write_text(printed.getvalue())
    file.write_text(json.dumps(content, indent=1, default=str) + "\n")


@interruptible()
def main() -> None:
    """Console command."""
    try:
        run(sys.argv[1:])
    except ValueError as error:
        sys.exit(fail(error))


if __name__ == "__main__":
    main()
