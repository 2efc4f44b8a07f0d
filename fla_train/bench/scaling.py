"""`fla-bench scaling`: `fla-train` on 1, 2, 4 .. GPUs, beside plain DistributedDataParallel.

One run after another has the machine to itself. Weak scaling keeps the micro-batch per GPU, strong scaling
the tokens per step; "overlap" reduces gradients during the backward pass instead of after it. These runs are
killed after their steps, but the weak one on the most GPUs runs on to its checkpoint. The same model and
micro-batch train there by PyTorch's DistributedDataParallel too, with communication and without. "saving" is
one run without and one with a checkpoint every 25 steps, of which the time that saves stopped training
counts.
"""

import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fla_train.bench.breakdown import KINDS, gpu_time_by_kind
from fla_train.bench.ranks import on_ranks
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.training.config import TrainConfig, load_config
from fla_train.training.process_group import join
from fla_train.utils.records import read_metrics

SEQ_LEN = 2048  # tokens
MICRO_BATCH = {"tiny": 1, "340m": 16, "1.3b": 8}  # sequences per GPU
WARM_UP = 4  # steps left out of the medians
SAVE_EVERY = 25  # steps
SAVING = range(2 * SAVE_EVERY + 1, 5 * SAVE_EVERY + 1)  # steps that count there; the first save takes memory
POLL = 0.5  # seconds between looks at the runs


@dataclass
class Run:
    name: str
    gpus: int
    overrides: list[str]
    model: str
    kind: str
    kill_after: int = 0  # steps; 0: let it end by itself
    last: int = 0  # step whose speed counts, after which one is profiled and the run may end; 0: all count
    tokens_per_second: float = 0.0  # median over all GPUs
    memory_gib: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # of rank 0's profiled step, ms by kind of kernel
    stall_s: float = 0.0  # of its checkpoint
    write_s: float = 0.0
    failure: str = ""


def overrides_of(model: str, tokens: int) -> list[str]:
    """Settings of `fla-train` for steps of `tokens`, without evaluation and statistics."""
    text = f"""
        model=gated_delta_product/{model} trainer.seq_len={SEQ_LEN} trainer.eval_tokens={SEQ_LEN}
        trainer.micro_batch_size={MICRO_BATCH[model]} trainer.global_batch_tokens={tokens}
        trainer.activation_checkpointing={str(model == "1.3b").lower()}
        trainer.eval_every=0 trainer.stats_every=0 trainer.check_backend=false
    """
    return text.split()


def speed_runs(models: list[str], counts: list[int], steps: int) -> Iterator[Run]:
    """Weak scaling, the same with overlap, and strong scaling at the tokens of the most GPUs."""
    last = steps - 3  # a step's speed is read during the next one, and `steps - 1` may be profiled
    long = ["trainer.checkpoint_every=0", f"trainer.max_steps={10 * steps}"]
    short = ["trainer.checkpoint_every=0", f"trainer.max_steps={steps}"]
    for model in models:
        tokens = MICRO_BATCH[model] * SEQ_LEN
        for count in counts:
            most = count == max(counts)
            weak = overrides_of(model, tokens * count)
            ends = [*weak, *short, f"trainer.profile_steps=[{steps - 1}]"]
            runs_on = [*weak, *long, f"trainer.profile_steps=[{steps}]"]
            name = f"{model}-weak-{count}"
            if most:
                yield Run(name, count, ends, model, "weak", last=last)
            else:
                yield Run(name, count, runs_on, model, "weak", steps, last)
            if most and count > 1:
                overlap = [*runs_on, "launch.overlap_communication=true"]
                yield Run(f"{model}-overlap-{count}", count, overlap, model, "overlap", steps, last)
            elif model == models[0] and not most:
                strong = [*overrides_of(model, tokens * max(counts)), *long]
                yield Run(f"{model}-strong-{count}", count, strong, model, "strong", steps, last)


def saving_runs(model: str, gpus: int) -> Iterator[Run]:
    """The same run without and with checkpoints."""
    common = overrides_of(model, MICRO_BATCH[model] * SEQ_LEN * gpus)
    common += [f"trainer.max_steps={2 * SAVING.stop}", "trainer.log_every=1", "trainer.keep_checkpoints=1"]
    for name, every in (("without", 0), ("with", SAVE_EVERY)):
        overrides = [*common, f"trainer.checkpoint_every={every}"]
        yield Run(f"{model}-saving-{name}", gpus, overrides, model, f"saving: {name}", SAVING.stop + 2)


def records(folder: Path) -> list[dict]:
    """The steps logged so far."""
    return [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


def carry_out(run: Run, folder: Path, overrides: list[str], limit: float) -> None:
    """Start it, wait until it has done what it is for, and read what it measured."""
    began = time.monotonic()
    command = ["fla-train", *overrides, *run.overrides, f"run.dir={folder / run.name}", "logger=none"]
    command += [f"launch.num_processes={run.gpus}"]
    with open(folder / f"{run.name}.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while process.poll() is None:
            late = time.monotonic() > began + limit
            done = run.kill_after and len(records(folder / run.name)) > run.kill_after
            if late or done:
                run.failure = "" if done else f"stopped after {limit:.0f} s"
                break
            time.sleep(POLL)
    finally:  # also when this process is asked to stop: what runs on takes the GPUs of the next run
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode not in (0, -signal.SIGKILL):
        run.failure = f"exit code {process.returncode}"
    read(run, folder)
    took = time.monotonic() - began
    speed = f"{run.tokens_per_second:,.0f} tokens/s"
    print(f"{run.name} on {run.gpus}: {speed} {run.failure} ({took:.0f} s in all)", flush=True)


def read(run: Run, folder: Path) -> None:
    """What a run has left: its metrics, the trace of a step, and what its log says of a checkpoint."""
    timed = [r for r in records(folder / run.name)[WARM_UP:] if r["step"] <= (run.last or r["step"])]
    if not timed:
        run.failure = run.failure or "no records"
        return
    run.tokens_per_second = statistics.median(record["tokens_per_second"] for record in timed)
    run.memory_gib = max(record["memory_gib"] for record in timed)
    for trace in (folder / run.name / "profile").glob("step-*-rank-0.json"):
        events = json.loads(trace.read_text())["traceEvents"]
        run.parts = gpu_time_by_kind(events)
        run.parts["whole step"] = 1e3 * tokens_per_step(run) / run.tokens_per_second
    metrics = read_metrics(folder / run.name / "metrics.jsonl")
    stalls = [record["checkpoint_stall_s"] for record in metrics if "checkpoint_stall_s" in record]
    written = re.findall(r"checkpoint .*written in ([\d.]+) s", (folder / f"{run.name}.log").read_text())
    if "-saving-" in run.name:
        run.tokens_per_second = speed_with_saves(metrics, tokens_per_step(run))
    run.stall_s, run.write_s = max(stalls, default=0.0), max(map(float, written), default=0.0)


def ddp_runs(weak: Run, folder: Path, steps: int) -> list[Run]:
    """Plain PyTorch on the model, the GPUs and the micro-batch of a run that has been carried out."""
    runs = []
    for kind, synced in (("plain DDP", True), ("no communication", False)):
        run = Run(f"{weak.model}-ddp-{weak.gpus}", weak.gpus, weak.overrides, weak.model, kind)
        try:
            config = load_config(folder / weak.name / "config.yaml")
            run.tokens_per_second, run.memory_gib = on_ranks(run.gpus, train_plainly, config, steps, synced)
        except Exception as failure:
            run.failure = " ".join(str(failure).split())
        print(f"{kind} on {run.gpus}: {run.tokens_per_second:,.0f} tokens/s {run.failure}", flush=True)
        runs.append(run)
    return runs


def train_plainly(config: TrainConfig, steps: int, synced: bool) -> tuple[float, float]:
    """On a rank: train on random tokens by DistributedDataParallel and a fused AdamW.

    Args:
        synced: whether gradients are averaged over the ranks.

    Returns:
        Tokens/s of all ranks (median over the steps), and GiB allocated at the peak.
    """
    trainer, on_gpu = config.trainer, config.launch.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    join(on_gpu=on_gpu)
    with device:
        model = DeltaProductForCausalLM(build_config(config.model)).float()
    checkpoint_activations(model, trainer.activation_checkpointing)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    size = (trainer.micro_batch_size, trainer.seq_len)
    times, ended = [], []
    for _ in range(steps):
        ids = torch.randint(config.model["vocab_size"], size, device=device)
        with nullcontext() if synced else ddp.no_sync():
            with torch.autocast(device.type, torch.bfloat16, enabled=trainer.autocasts):
                loss = ddp(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if on_gpu:  # one step is waited for while the next one runs, as `fla-train` does
            ended.append(torch.cuda.Event())
            ended[-1].record()
            ended[max(0, len(ended) - 2)].synchronize()
        times.append(time.perf_counter())
    took = statistics.median(after - before for before, after in pairwise(times[WARM_UP:]))
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return dist.get_world_size() * size[0] * size[1] / took, memory


def speed_with_saves(metrics: list[dict], tokens: int) -> float:
    """Tokens per second over the steps of SAVING, the time that saves stopped training included."""
    seconds = sum(tokens / r["tokens_per_second"] for r in metrics if "loss" in r and r["step"] in SAVING)
    seconds += sum(r.get("checkpoint_stall_s", 0.0) for r in metrics if r["step"] + 1 in SAVING)
    return tokens * len(SAVING) / seconds


def tokens_per_step(run: Run) -> int:
    values = dict(override.split("=", 1) for override in run.overrides)
    return int(values["trainer.global_batch_tokens"])


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


def parts_table(runs: list[Run]) -> str:
    """Markdown; ms of a step on rank 0 by kind of kernel. Communication beside other work counts in full."""
    kinds = [kind for kind in KINDS if any(kind in run.parts for run in runs)] + ["whole step"]
    lines = ["| run | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    for run in runs:
        if run.parts:
            cells = (f"{run.parts[kind]:.1f}" if kind in run.parts else "" for kind in kinds)
            lines.append(f"| {run.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bench_scaling(
    folder: Path,
    overrides: list[str],
    *,
    gpus: list[int],
    models: list[str],
    steps: int,
    only: str,
    limit: float,
) -> list[Run]:
    """Carry out the runs and print tables.

    Args:
        folder: new; runs and logs go there.
        overrides: of every `fla-train`, such as data=fineweb.
        gpus: numbers of GPUs.
        models: keys of `MICRO_BATCH`.
        steps: of a run whose speed is measured.
        only: regular expression that the names of runs must match.
        limit: seconds for one run.

    Raises:
        ValueError: the folder exists, or `only` is no regular expression or matches no run.
    """
    if folder.exists():
        raise ValueError(f"--folder {folder} exists: give a new one")
    most = max(gpus)
    known = list(speed_runs(models, gpus, steps))
    if most > 1:
        known += saving_runs(models[0], most)
    try:
        runs = [run for run in known if re.search(only, run.name)]
    except re.error as error:
        raise ValueError(f"--only {only} is no regular expression: {error}") from error
    if not runs:
        raise ValueError(f"--only {only} matches none of {', '.join(run.name for run in known)}")
    folder.mkdir(parents=True)
    for run in list(runs):
        carry_out(run, folder, overrides, limit)
        if run.kind == "weak" and run.gpus == most > 1 and re.search(only, f"{run.model}-ddp-{most}"):
            runs += ddp_runs(run, folder, steps)
    print("\n" + table(runs) + "\n\n" + parts_table(runs), flush=True)
    for run in runs:
        if run.write_s:
            print(f"{run.name}: its checkpoint stopped training for {run.stall_s} s of {run.write_s} s")
    return runs
