"""`fla-bench evaluation`: time and compare the answers to lm-eval tasks with `HFLM`'s; time the sweep.

`HFLM` is what `lm_eval --model hf` runs. Both answer the same requests with the same model of random weights.
Only the time in which the model answers counts, not that of reading data and building requests, which is the
same for both. Both answer some requests of a task before either is timed, so that kernels are compiled and
memory is there; batch sizes that come later are new in the first round only.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.harness import FlaTrainLM, task_manager
from fla_train.eval.mirror import hub_datasets, mirror_folder
from fla_train.eval.perplexity import loss_table
from fla_train.models import DeltaProductForCausalLM, build_config

MAX_LENGTH = 2048
WARM_UP = 256  # requests of each task; all of wikitext


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


def time_answers(
    lm: HFLM, asked: dict[str, list[Instance]], device: str, most: int | None = None
) -> tuple[float, np.ndarray]:
    """Seconds in which `lm` answers the first `most` requests of each kind (None: all), and its answers."""
    start, answers = wait(device), []
    for method, requests in asked.items():
        answers += getattr(lm, method)(requests[:most], disable_tqdm=True)
    values = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    return wait(device) - start, np.array(values, float)


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
    return {
        "seconds": round(seconds, 3),
        "tokens_per_second": round(4 * length / seconds),
        "peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1) if device == "cuda" else None,
    }


def bench_evaluation(
    model_config: Mapping[str, Any],
    mirror: Path,
    tokenizer_name: str,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    limit: int | None,
    batch_size: str,
    rounds: int,
) -> Iterator[dict]:
    """A record per measurement: of each length, of each task and round, and of all tasks in each round.

    Args:
        model_config: of the model; bf16 on a GPU, else fp32.
        mirror: folder that scripts/build_eval_mirror.py wrote.
        tokenizer_name: folder or Hub name.
        limit: documents of each task; None: all.
        batch_size: of `HFLM`; ours is always `auto`.
        rounds: how often all requests of a task are answered.

    Raises:
        ValueError: for a mirror that is no folder, or an unknown task.
    """
    mirror, manager = mirror_folder(mirror), task_manager(list(tasks), None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(TokenizerConfig(name=tokenizer_name))
    torch.manual_seed(0)
    model = DeltaProductForCausalLM(build_config({**model_config, "vocab_size": len(tokenizer)}))
    model = model.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    for length in lengths:
        yield {"length": length, **time_sweep(model, length, device)}
    options = {"tokenizer": tokenizer, "max_length": MAX_LENGTH}
    hflm = {"batch_size": batch_size, "softmax_dtype": "float32"}
    bridges: dict[str, HFLM] = {
        "ours": FlaTrainLM(model, batch_size="auto", **options),
        "hflm": HFLM(model, backend="causal", **hflm, **options),
    }
    totals = [dict.fromkeys(bridges, 0.0) for _ in range(rounds)]
    for task in tasks:
        with hub_datasets(mirror):
            asked = requests_of(task, manager, limit)
        for lm in bridges.values():
            time_answers(lm, asked, device, WARM_UP)
        for number, total in enumerate(totals, 1):
            found = {name: time_answers(lm, asked, device) for name, lm in bridges.items()}
            seconds = {name: time for name, (time, _) in found.items()}
            total |= {name: total[name] + seconds[name] for name in bridges}
            ours, theirs = (values for _, values in found.values())
            off = float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1)))
            yield {"task": task, "round": number, **ratio(seconds), "difference": float(f"{off:.1e}")}
    for number, total in enumerate(totals, 1):
        yield {"total": ",".join(tasks), "round": number, **ratio(total)}
