"""Tokens per second on 1, 2, 4 .. GPUs of one machine, and a run resumed on other numbers of them.

    python scripts/time_scaling.py runs/scaling data=fineweb
    python scripts/time_scaling.py runs/scaling --gpus 1 2 4 --models 340m data=local data.path=/data/web

Everything after the options goes to every `fla-train`. Runs that leave GPUs free share the machine. Weak
scaling keeps the micro-batch per GPU, strong scaling the tokens per step; "no overlap" reduces gradients
after the backward pass instead of during it. A small model trained on the most GPUs, then on half of them,
then on the most again must follow the loss curve of one GPU. Tables go to stdout and, with the records, to
FOLDER/scaling.json.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SEQ_LEN = 2048  # tokens
MICRO_BATCH = {"340m": 16, "1.3b": 8}  # sequences per GPU
WARM_UP = 4  # steps left out of the medians


@dataclass
class Run:
    name: str
    gpus: int
    overrides: list[str]
    model: str = ""
    kind: str = ""
    tokens_per_second: float = 0.0  # median over all GPUs
    memory_gib: float = 0.0
    failure: str = ""


def speed_runs(models: list[str], counts: list[int], steps: int) -> Iterator[Run]:
    """Weak scaling, the same without overlap, and strong scaling at the tokens of the most GPUs."""
    for model in models:
        tokens = MICRO_BATCH[model] * SEQ_LEN
        common = [
            f"model=gated_delta_product/{model}",
            f"trainer.seq_len={SEQ_LEN}",
            f"trainer.micro_batch_size={MICRO_BATCH[model]}",
            f"trainer.max_steps={steps}",
            f"trainer.activation_checkpointing={str(model == '1.3b').lower()}",
            "trainer.eval_every=0",
            f"trainer.eval_tokens={SEQ_LEN}",
            "trainer.checkpoint_every=0",
            "trainer.stats_every=0",
            "trainer.check_backend=false",
        ]
        for count in counts:
            weak = [*common, f"trainer.global_batch_tokens={tokens * count}"]
            yield Run(f"{model}-weak-{count}", count, weak, model, "weak")
            if count == max(counts) > 1:
                apart = [*weak, "launch.overlap_communication=false"]
                yield Run(f"{model}-apart-{count}", count, apart, model, "no overlap")
            elif model == models[0] and count < max(counts):
                strong = [*common, f"trainer.global_batch_tokens={tokens * max(counts)}"]
                yield Run(f"{model}-strong-{count}", count, strong, model, "strong")


def elastic_runs(most: int) -> list[Run]:
    """One GPU throughout, then one run on the most GPUs, on half of them, and on the most again; in fp32."""
    common = [
        "model=gated_delta_product/tiny",
        "schedule=constant",
        "schedule.warmup_steps=5",
        "trainer.precision=fp32",
        "trainer.seq_len=256",
        "trainer.micro_batch_size=2",
        f"trainer.global_batch_tokens={256 * 2 * most}",
        "trainer.eval_tokens=4096",
        "trainer.check_backend=false",
    ]
    parts = [(most, 10), (most // 2, 20), (most, 30)]
    runs = [Run("elastic-1", 1, [*common, "trainer.max_steps=30"])]
    return runs + [Run("elastic", gpus, [*common, f"trainer.max_steps={until}"]) for gpus, until in parts]


def rounds(runs: list[Run], gpus: int) -> Iterator[list[Run]]:
    """Largest first; each round fills the machine with what fits."""
    waiting = sorted(runs, key=lambda run: -run.gpus)
    while waiting:
        free, batch = gpus, []
        for run in list(waiting):
            if run.gpus <= free:
                free -= run.gpus
                batch.append(run)
                waiting.remove(run)
        yield batch


def start(run: Run, folder: Path, devices: list[int], further: list[str]) -> subprocess.Popen:
    command = ["fla-train", *further, *run.overrides, f"run.dir={folder / run.name}", "logger=none"]
    command += [f"launch.num_processes={run.gpus}", "launch.device=cuda"]
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    with open(folder / f"{run.name}.log", "a") as log:
        return subprocess.Popen(command, env=os.environ | visible, stdout=log, stderr=log)


def records(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def run_together(batch: list[Run], folder: Path, further: list[str], limit: float) -> None:
    """Start them on GPUs of their own, wait for all, and read what they measured."""
    first, processes = 0, []
    for run in batch:
        processes.append(start(run, folder, list(range(first, first + run.gpus)), further))
        first += run.gpus
    for run, process in zip(batch, processes, strict=True):
        try:
            code = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = f"stopped after {limit:.0f} s"
        try:
            timed = records(folder / run.name)[WARM_UP:]
            run.tokens_per_second = statistics.median(record["tokens_per_second"] for record in timed)
            run.memory_gib = max(record["memory_gib"] for record in timed)
        except (OSError, statistics.StatisticsError, ValueError):
            code = code or "no records"
        run.failure = str(code or "")
        print(f"{run.name} on {run.gpus}: {run.tokens_per_second:,.0f} tokens/s {run.failure}", flush=True)


def table(runs: list[Run]) -> str:
    """Markdown; efficiency is the speed per GPU over that of one GPU of the same model."""
    alone = {run.model: run.tokens_per_second for run in runs if run.kind == "weak" and run.gpus == 1}
    lines = ["| model | scaling | GPUs | tokens/s | efficiency | GiB per GPU |", "|---|---|---|---|---|---|"]
    for run in sorted(runs, key=lambda run: (run.model, run.kind, run.gpus)):
        share = run.tokens_per_second / run.gpus / alone[run.model] if alone.get(run.model) else float("nan")
        speed = run.failure or f"{run.tokens_per_second:,.0f}"
        lines.append(
            f"| {run.model} | {run.kind} | {run.gpus} | {speed} | {share:.1%} | {run.memory_gib:.1f} |"
        )
    return "\n".join(lines)


def elastic(folder: Path, most: int, further: list[str], limit: float) -> float:
    """Largest relative difference of the losses from those of one GPU."""
    for run in elastic_runs(most):
        run_together([run], folder, further, limit)
    curves = [{r["step"]: r["loss"] for r in records(folder / name)} for name in ("elastic-1", "elastic")]
    if curves[0].keys() != curves[1].keys():
        raise ValueError(f"steps differ: {sorted(curves[0].keys() ^ curves[1].keys())}")
    return max(abs(curves[1][step] / loss - 1) for step, loss in curves[0].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder for runs, logs and scaling.json")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MICRO_BATCH, default=list(MICRO_BATCH))
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    options, further = parser.parse_known_args()
    options.folder.mkdir(parents=True)
    runs = list(speed_runs(options.models, options.gpus, options.steps))
    for batch in rounds(runs, max(options.gpus)):
        run_together(batch, options.folder, further, options.limit)
    print("\n" + table(runs), flush=True)
    difference = (
        elastic(options.folder, max(options.gpus), further, options.limit) if max(options.gpus) > 1 else None
    )
    if difference is not None:
        print(f"\nResumed on other numbers of GPUs: losses within {difference:.1e} of one GPU's.")
    report = {"runs": [asdict(run) for run in runs], "elastic_loss_difference": difference}
    (options.folder / "scaling.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
