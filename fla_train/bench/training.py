"""`fla-bench train`: time optimizer steps on random tokens, of our models and of peers.

Each model runs in separate processes, one a GPU, so that none inherits another's memory. The step is
`fla-train`'s: the engine of `training.engine` (accelerate, DeepSpeed ZeRO-2) with the config's precision and
optimizer, fed by the loader's thread; what is left out is disks, evaluation, checkpoints and logs.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fla_train.bench.breakdown import breakdown
from fla_train.bench.models import build, training_flops
from fla_train.bench.ranks import on_ranks
from fla_train.bench.roofline import Ceilings, link_bandwidth, step_roofline
from fla_train.data.sampler import Batch, BatchSampler, PrefetchLoader
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.training.config import (
    AUTO,
    LoggerConfig,
    TrainConfig,
    WandbConfig,
    accumulation_steps,
    records_graph,
    resolve,
    resolve_device,
    validate,
    with_vocabulary,
)
from fla_train.training.engine import Outcome, build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.features.cuda_graph import CudaGraph, CudaGraphPass
from fla_train.training.process_group import split_ranks
from fla_train.training.run_data import to_batch
from fla_train.utils.throughput import Throughput

WARM_UP = 3  # steps: compilation, the optimizer's first allocations


@dataclass(frozen=True)
class Part:
    """One kind of work of a step, in milliseconds, and the least it can take where that is known."""

    ms: float
    floor_ms: float | None = None


@dataclass(frozen=True)
class StepRow:
    """What was measured of one model."""

    model: str
    refused: str | None = None  # why nothing was
    processes: int = 1
    parameters: int = 0  # all that the model holds
    tokens_per_step: int = 0
    first_step_s: float = 0.0  # of the process: kernels are compiled, or come from their cache
    step_ms: float = 0.0  # mean over the timed steps
    tokens_per_second: float = 0.0
    mfu: float = 0.0  # by the model's own FLOPs, of the ceiling of matrix products
    # Peak, allocated on the first GPU; resident on a CPU. None with a CUDA graph: its pool is not counted.
    memory_bytes: int | None = None
    # Of the first process in one more step, which profiling slows on a CPU; "data" is the host's wait in a
    # timed one. Communication counts in full, whether it runs beside other work or waits for other processes.
    parts: dict[str, Part] = field(default_factory=dict)


class RandomTokens:
    """Dataset of random tokens, for the loader."""

    def __init__(self, vocab_size: int, seq_len: int):
        self._vocab_size, self._seq_len = vocab_size, seq_len

    def sequences(self, indices: np.ndarray) -> Tensor:
        """Dataset `indices`. Returns [n, seq_len] int64."""
        draw = np.random.default_rng(indices)
        return torch.from_numpy(draw.integers(self._vocab_size, size=(len(indices), self._seq_len)))


def bench_models(
    config: TrainConfig, names: Sequence[str], ceilings: Ceilings, *, steps: int
) -> Iterator[StepRow]:
    """Measure each of `names` (keys of MODELS) on the sizes of `config`.

    Raises:
        ValueError: a config that `fla-train` refuses too, of several machines, or of a task.
    """
    quiet = LoggerConfig(wandb=WandbConfig(mode="disabled", project=""), tensorboard=False)
    if config.launch.num_processes == AUTO:
        config = replace(config, launch=replace(config.launch, num_processes=1))
    config = replace(config, logger=quiet)  # steps are timed and not logged: wandb need not be installed
    validate(config)
    if (machines := config.launch.num_machines) != 1:
        raise ValueError(f"launch.num_machines={machines}: fla-bench train measures one machine")
    if config.task is not None:
        raise ValueError("fla-bench train measures language models: leave task at null")
    config = with_vocabulary(resolve(config), offline=True)  # the tokens are random: no tokenizer is fetched
    processes = config.launch.num_processes
    arguments = (ceilings, steps, max(1, torch.get_num_threads() // processes))
    for name in names:
        if config.launch.context_parallel > 1 and name != "ours":
            yield StepRow(name, refused="it needs whole sequences: launch.context_parallel=1")
            continue
        try:
            yield on_ranks(processes, measure, config, name, *arguments)
        except Exception as failure:  # a peer that is absent, or fails in any way of its own
            if name == "ours" and not isinstance(failure, torch.OutOfMemoryError):
                raise
            line = " ".join(str(failure).split())[:160]
            yield StepRow(name, refused=f"{type(failure).__name__}: {line}")


def measure(config: TrainConfig, name: str, ceilings: Ceilings, steps: int, threads: int) -> StepRow:
    """Measure one model as the rank that the environment names, in a process without a group yet."""
    torch.set_num_threads(threads)
    torch.manual_seed(config.seed)
    place = resolve_device(config)
    if place == "cpu":  # also where there are GPUs
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device(place):  # drawing 1.5B weights on a CPU takes long
        model = build(name, config)
    graph = name == "ours" and records_graph(config)
    checkpoint_activations(model, config.trainer.activation_checkpointing, preserve_rng_state=not graph)
    parameters = sum(p.numel() for p in model.parameters())
    engine = build_engine(model.float(), config)
    device, trainer, ranks = engine.device, config.trainer, dist.get_world_size()
    cuda_graph = CudaGraphPass(engine.module, bf16=config.trainer.autocasts) if graph else None
    bad_steps = BadSteps(device, max_grad_norm=config.optimizer.max_grad_norm)
    mesh = split_ranks(config.launch.context_parallel)
    global_batch = accumulation_steps(config) * trainer.micro_batch_size * mesh.data_world
    plan = BatchSampler(global_batch, trainer.micro_batch_size, mesh.data_rank, mesh.data_world)
    tokens = plan.global_batch * trainer.seq_len
    with PrefetchLoader(RandomTokens(config.model["vocab_size"], trainer.seq_len), plan) as sequences:

        def batch() -> list[Batch]:
            """The micro-batches of a step: of whole sequences ids and labels, since peers know of no more."""
            return [to_batch(next(sequences), device, mesh.context) for _ in range(plan.accumulation)]

        def step(micro_batches: list[Batch]) -> Outcome:
            features = [] if cuda_graph is None else [CudaGraph(cuda_graph)]
            return train_step(engine, micro_batches, config.optimizer.lr, bad_steps, features=features)

        began = time.perf_counter()
        step(batch()).read()
        first_step_s = time.perf_counter() - began
        for _ in range(WARM_UP - 1):
            step(batch()).read()
        devices = ranks if device.type == "cuda" else 1  # processes on a CPU share it
        throughput = Throughput(training_flops(name, engine.module, config), devices * ceilings.flops, device)
        throughput.start()
        outcomes = []
        for _ in range(steps):
            with throughput.waiting():
                micro_batches = batch()
            outcomes.append(step(micro_batches))
        results = [outcome.read() for outcome in outcomes]
        throughput.stop(steps * tokens)
        speed = throughput.read()
        if any(result.skipped for result in results):
            return StepRow(name, refused="the loss or a gradient was not finite")
        kinds = breakdown(lambda: step(batch()).read(), device)
    recorded = cuda_graph is not None and cuda_graph.recordable
    link = link_bandwidth(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    bounds = step_roofline(config, tokens, parameters, ceilings, ranks, link) if name == "ours" else {}
    step_ms = 1e3 * tokens / speed["tokens_per_second"]
    parts = {kind: Part(ms, bounds.get(kind)) for kind, ms in kinds.items()}
    return StepRow(
        name,
        processes=ranks,
        parameters=parameters,
        tokens_per_step=tokens,
        first_step_s=first_step_s,
        step_ms=step_ms,
        tokens_per_second=speed["tokens_per_second"],
        mfu=speed["mfu"],
        memory_bytes=None if recorded else round(speed["memory_gib"] * 2**30),
        parts=parts | {"data": Part(speed["data_wait"] * step_ms)},
    )


def markdown(row: StepRow) -> str:
    """The row as a short table."""
    if row.refused is not None:
        return f"### {row.model}\n\nno speed: {row.refused}\n"
    total = sum(part.ms for part in row.parts.values())
    on = f", {row.processes} processes" if row.processes > 1 else ""
    memory = "" if row.memory_bytes is None else f"{row.memory_bytes / 2**30:.2f} GiB, "
    lines = [
        f"### {row.model}: {row.parameters / 1e6:.1f}M parameters{on}",
        "",
        f"{row.tokens_per_second:,.0f} tokens/s, {row.step_ms:.1f} ms a step of {row.tokens_per_step:,} "
        f"tokens, MFU {100 * row.mfu:.1f}%, {memory}first step after {row.first_step_s:.1f} s",
        "",
        f"| part of a profiled step | ms | share of {total:.1f} ms | floor ms |",
        "|---|---|---|---|",
    ]
    for kind, part in row.parts.items():
        floor = "" if part.floor_ms is None else f"{part.floor_ms:.2f}"
        lines.append(f"| {kind} | {part.ms:.2f} | {100 * part.ms / total:.1f}% | {floor} |")
    return "\n".join([*lines, ""])
