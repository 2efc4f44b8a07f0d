#!/usr/bin/env python
"""python scripts/time_evaluation.py MIRROR TOKENIZER [--model gated_delta_product/340m] [--limit 200]

Time the answers to the zero-shot suite's requests, by our bridge and by plain lm-eval (`HFLM`, which is what
`lm_eval --model hf` runs) on the same model with random weights, and the perplexity sweep at growing lengths.

MIRROR is what scripts/build_eval_mirror.py wrote, TOKENIZER a folder or Hub name. Only the time in which
the model answers counts, not that of reading data and building requests, which is the same for both. Both
answer some requests of a task before either is timed, so that kernels are compiled and memory is there; sizes
of batches that come later are new in the first of the `--rounds` only.
Prints a JSON line per measurement as soon as it is done: for a task the seconds of both and their ratio in
each round, at the end the same for all tasks.
"""

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fla_train.cli.app import compose
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.harness import FlaTrainLM
from fla_train.eval.mirror import hub_datasets
from fla_train.eval.paper import ZERO_SHOT
from fla_train.eval.perplexity import loss_table
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.training import schema

MAX_LENGTH = 2048
WARM_UP = 256  # requests of each task; all of wikitext


def build_model(name: str, vocab_size: int, device: str) -> DeltaProductForCausalLM:
    """A model of configs/model with random weights; bf16 on a GPU."""
    schema.register()
    config = schema.to_config(compose("train", [f"model={name}"]))
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(build_config(config.model | {"vocab_size": vocab_size}))
    return model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def wait(device: str) -> float:
    """The time once the device has done all that was asked of it."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Recorder(LM):
    """Remembers what a task asks, and answers with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: dict[str, list[Instance]] = defaultdict(list)  # by the method that answers

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        self.asked["loglikelihood"] += requests
        return [(0.0, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        self.asked["loglikelihood_rolling"] += requests
        return [0.0] * len(requests)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        raise ValueError("only tasks that ask for likelihoods can be timed")


def requests_of(task: str, manager: TaskManager, limit: int | None) -> dict[str, list[Instance]]:
    """What a task asks of its first `limit` documents, by the method of a model that answers."""
    recorder = Recorder()
    simple_evaluate(recorder, tasks=[task], task_manager=manager, limit=limit, bootstrap_iters=0)
    return recorder.asked


def time_answers(lm: HFLM, asked: dict[str, list[Instance]], device: str, most: int | None = None) -> float:
    """Seconds in which `lm` answers, at `most` so many requests of a kind."""
    start = wait(device)
    for method, requests in asked.items():
        getattr(lm, method)(requests[:most], disable_tqdm=True)
    return wait(device) - start


def ratio(seconds: dict[str, float]) -> dict[str, float]:
    """The seconds, rounded, and how many times as fast ours is."""
    rounded = {name: round(value, 3) for name, value in seconds.items()}
    return rounded | {"ratio": round(seconds["hflm"] / seconds["ours"], 2)}


def time_sweep(model: DeltaProductForCausalLM, length: int, device: str) -> dict[str, float]:
    """Seconds and peak memory for 4 sequences of `length` tokens; the second of two runs."""
    documents = torch.randint(model.config.vocab_size, (4, length)).tolist()
    for _ in range(2):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = wait(device)
        loss_table(model, documents, (0, length), prefix=[1], chunk=1024, batch_size=4)
        seconds = wait(device) - start
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan")
    return {
        "length": length,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(4 * length / seconds),
    } | {"peak_mib": round(peak, 1) if device == "cuda" else None}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mirror", type=Path)
    parser.add_argument("tokenizer")
    parser.add_argument("--model", default="gated_delta_product/340m")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--tasks", default=",".join(dict.fromkeys(column.task for column in ZERO_SHOT)))
    parser.add_argument("--batch-size", default="auto", help="of HFLM; ours is always auto")
    parser.add_argument("--rounds", type=int, default=2, help="how often all requests of a task are answered")
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(TokenizerConfig(name=arguments.tokenizer))
    model = build_model(arguments.model, len(tokenizer), device)
    for length in map(int, filter(None, arguments.lengths.split(","))):
        print(json.dumps({"sweep": arguments.model, **time_sweep(model, length, device)}), flush=True)
    options = {"tokenizer": tokenizer, "max_length": MAX_LENGTH}
    hflm = {"batch_size": arguments.batch_size, "softmax_dtype": "float32"}
    bridges: dict[str, HFLM] = {
        "ours": FlaTrainLM(model, batch_size="auto", **options),
        "hflm": HFLM(model, backend="causal", **hflm, **options),
    }
    manager = TaskManager()
    totals = [dict.fromkeys(bridges, 0.0) for _ in range(arguments.rounds)]
    for task in arguments.tasks.split(","):
        with hub_datasets(arguments.mirror):
            asked = requests_of(task, manager, arguments.limit)
        for lm in bridges.values():
            time_answers(lm, asked, device, WARM_UP)
        for number, total in enumerate(totals, 1):
            seconds = {name: time_answers(lm, asked, device) for name, lm in bridges.items()}
            total |= {name: total[name] + seconds[name] for name in bridges}
            print(json.dumps({"task": task, "round": number, **ratio(seconds)}), flush=True)
    for number, total in enumerate(totals, 1):
        print(json.dumps({"total": arguments.tasks, "round": number, **ratio(total)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
