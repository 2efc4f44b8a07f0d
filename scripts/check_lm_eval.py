#!/usr/bin/env python
"""python scripts/check_lm_eval.py MIRROR [--limit N] [--tasks wikitext,piqa] [--device cuda] [--batch-size 9]

Prove on the papers' zero-shot tasks that our numbers are lm-eval's, with small models that read bytes:

  bridge   a Llama through `FlaTrainLM` and plain `HFLM`: every log-likelihood must be equal to the bit
  shared   a Gated DeltaProduct through `FlaTrainLM`, which reads shared contexts once, and through `HFLM`
  direct   200 requests of each task by one fp64 forward pass per request, against `log_likelihoods` in fp64

MIRROR is what scripts/build_eval_mirror.py wrote; without --limit the full splits are used. Prints a line per
task; the exit code is 1 if a value is off.
"""

import argparse
import copy
import sys
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.harness import FlaTrainLM
from fla_train.eval.likelihood import log_likelihoods
from fla_train.eval.mirror import hub_datasets
from fla_train.eval.paper import ZERO_SHOT
from fla_train.models import DeltaProductConfig, DeltaProductForCausalLM

SIZE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
MAX_LENGTH = 2048
CLOSE = 1e-5  # relative, between two orders of the same fp32 additions
DIRECT = 200  # requests of each task in fp64


def models(device: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A Llama and a Gated DeltaProduct whose logits differ enough that no two tie."""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(num_attention_heads=2, max_position_embeddings=MAX_LENGTH, initializer_range=0.3, **SIZE)
    )
    ours = DeltaProductForCausalLM(
        DeltaProductConfig(
            num_heads=2, head_dim=32, num_householder=2, use_forget_gate=True, initializer_range=0.1, **SIZE
        )
    )
    return llama.to(device).eval(), ours.to(device).eval()


def values(lm: HFLM, task: str, manager: TaskManager, limit: int | None) -> list[float]:
    """Every log-likelihood of a task, in the order of its documents."""
    options = {"task_manager": manager, "limit": limit, "bootstrap_iters": 0, "log_samples": True}
    samples = simple_evaluate(lm, tasks=[task], **options)["samples"][task]
    answers = (answer for sample in samples for responses in sample["resps"] for answer in responses)
    return [float(answer[0] if isinstance(answer, tuple | list) else answer) for answer in answers]


@torch.no_grad()
def direct(model: PreTrainedModel, rows: list[tuple]) -> float:
    """The largest relative difference to one fp64 forward pass per request."""
    found = log_likelihoods(model, rows, max_length=MAX_LENGTH, batch_tokens=16 * MAX_LENGTH)
    worst = 0.0
    for (context, continuation), (value, _) in zip(rows, found, strict=True):
        ids = torch.tensor([[*context, *continuation][-(MAX_LENGTH + 1) :]], device=model.device)
        logits = model(ids[:, :-1]).logits[0, -len(continuation) :]
        expected = logits.log_softmax(-1).gather(1, ids[0, -len(continuation) :, None]).sum().item()
        worst = max(worst, abs(value - expected) / abs(expected))
    return worst


def recorded(lm: FlaTrainLM) -> list[tuple]:
    """Make `lm` keep the token requests that lm-eval gives it; the list they go to."""
    kept: list[tuple] = []
    real = lm._answer

    def watched(pairs: list[tuple], quiet: bool) -> list:
        kept.extend(pairs)
        return real(pairs, quiet)

    lm._answer = watched
    return kept


def check(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    manager: TaskManager,
    limit: int | None,
    device: str,
    batch_size: int,
) -> bool:
    """Compare one task and print its line; whether all is well."""
    llama, ours = models(device)
    options = {"tokenizer": tokenizer, "batch_size": batch_size, "max_length": MAX_LENGTH}
    plain = {"backend": "causal", "softmax_dtype": "float32"} | options
    a = values(FlaTrainLM(llama, **options), task, manager, limit)
    b = values(HFLM(llama, **plain), task, manager, limit)
    quick = FlaTrainLM(ours, **options)
    requests = recorded(quick)
    c = values(quick, task, manager, limit)
    d = values(HFLM(ours, **plain), task, manager, limit)
    off = max(abs(x - y) / max(abs(y), 1.0) for x, y in zip(c, d, strict=True))
    wide = copy.deepcopy(ours).double()
    wide.config.backend = "chunk"  # on a GPU too: triton takes no fp64
    step = max(len(requests) // DIRECT, 1)
    worst = direct(wide, requests[::step][:DIRECT])
    equal = sum(x == y for x, y in zip(a, b, strict=True))
    counts = f"{task:>15}: {len(a):6} values; bridge: {equal} equal"
    print(f"{counts}; shared: off by {off:.1e}; direct: off by {worst:.1e}", flush=True)
    return equal == len(a) and off < CLOSE and worst < CLOSE


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mirror", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tasks", default=",".join(dict.fromkeys(column.task for column in ZERO_SHOT)))
    arguments = parser.parse_args()
    if not arguments.mirror.is_dir():
        parser.error(f"{arguments.mirror} is no folder: build one with scripts/build_eval_mirror.py")
    tokenizer, manager = load_tokenizer(TokenizerConfig(name="bytes")), TaskManager()
    with hub_datasets(arguments.mirror):
        fine = [
            check(task, tokenizer, manager, arguments.limit, arguments.device, arguments.batch_size)
            for task in arguments.tasks.split(",")
        ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
