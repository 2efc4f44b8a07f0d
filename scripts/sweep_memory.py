#!/usr/bin/env python
"""python scripts/sweep_memory.py TOKENIZER FILE LENGTH...

Show that the memory of a sweep does not grow with the context: `fla-eval` on one sequence of each LENGTH
tokens of FILE (parquet or JSON lines), each in a process of its own, with a small random model on a CPU
thread. TOKENIZER is a folder or Hub name; its whole vocabulary is the model's. Prints peak memory and time of
each process, start and imports included.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import ids_needed, load_tokenizer
from fla_train.hub import CardInfo, export_model
from fla_train.models import DeltaProductConfig, DeltaProductForCausalLM

RUN = """
import resource
from fla_train.cli.eval import main
status = main()
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
raise SystemExit(status)
"""


def make_model(tokenizer: str, folder: Path) -> Path:
    """A random Gated DeltaProduct of 2 layers and 64 channels for the tokenizer."""
    loaded = load_tokenizer(TokenizerConfig(name=tokenizer))
    torch.manual_seed(0)
    config = DeltaProductConfig(
        vocab_size=ids_needed(loaded), hidden_size=64, num_hidden_layers=2, intermediate_size=96,
        num_heads=2, head_dim=16, num_householder=2, use_forget_gate=True,
    )  # fmt: skip
    return export_model(DeltaProductForCausalLM(config), loaded, folder, CardInfo(seq_len=2048))


def sweep(model: Path, file: str, length: int, output: Path) -> tuple[int, float]:
    """Peak memory (MiB) and seconds of one evaluation."""
    options = {
        "sets": f"[{file}]",
        "layout": "packed",
        "documents": 1,
        "lengths": f"[{length}]",
        "bucket": 10000,
        "training_length": "false",
    }
    command = [
        sys.executable,
        "-c",
        RUN,
        f"checkpoint={model}",
        "suite=perplexity",
        f"output={output}",
        "device=cpu",
    ]
    command += [f"suite.perplexity.{key}={value}" for key, value in options.items()]
    start = time.monotonic()
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    return int(done.stdout.split()[-1]), time.monotonic() - start


def main(arguments: list[str]) -> int:
    if len(arguments) < 3 or not all(length.isdigit() for length in arguments[2:]):
        print("usage: python scripts/sweep_memory.py TOKENIZER FILE LENGTH...", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as place:
        model = make_model(arguments[0], Path(place) / "model")
        for length in map(int, arguments[2:]):
            peak, seconds = sweep(model, arguments[1], length, Path(place) / str(length))
            print(f"{length:>10,} tokens: {peak:,} MiB, {seconds:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
