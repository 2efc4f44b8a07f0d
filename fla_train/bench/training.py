"""`fla-bench train`: time optimizer steps on random tokens, of our models and of peers.

Each model runs in new processes, one per GPU, so none inherits another's memory. The step is `fla-train`'s:
its engine (accelerate, DeepSpeed ZeRO-2) with the config's precision and optimizer, fed by the loader's
thread. Disks, evaluation, checkpoints and logs are left out.
"""

import json
import os
import re
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fla_train.bench.models import Compose, build, training_flops
from fla_train.bench.ranks import on_ranks
from fla_train.bench.report import Report, Row
from fla_train.bench.roofline import Ceilings
from fla_train.data.sampler import Batch, BatchSampler, PrefetchLoader
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.run.resolve import resolve
from fla_train.training.checks import features_of
from fla_train.training.config import TrainConfig
from fla_train.training.engine import Outcome, build_engine, train_step
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.features.cuda_graph import CudaGraph
from fla_train.training.features.float8 import Float8
from fla_train.training.process_group import RankMesh
from fla_train.training.run_data import to_batch
from fla_train.utils.throughput import Throughput

# Steps are timed and not logged, so wandb need not be installed. The length of the run plays no part.
UNUSED = ("logger.wandb.mode=disabled", "logger.tensorboard=false")
UNUSED += ("trainer.max_steps=1000000", "trainer.max_tokens=null", "trainer.epochs=null")
WARM_UP = 3  # steps that compile kernels and allocate the optimizer's moments

COLUMNS = (
    "model parameters processes tokens_per_step tokens_per_second step_ms MFU_% memory_GiB first_step_s note"
).split()
TIMES = ("model", "work", "ms", "%_of_the_profiled_step")
# The first match counts. "operator" mixes tokens: the delta product, a peer's, or attention. Copies by
# multi_tensor_apply collect gradients in the one tensor that is reduced.
GPU_KERNELS = {
    "communication": r"^nccl",
    "copies": r"multi_tensor_apply.*Copy",
    "optimizer": r"multi_tensor_apply|FusedAdam",
    "operator": r"^(chunk|fused_recurrent|segment|mixer_step|attention_step)_|delta|wy_|tril|flash|fmha|sdpa",
    "loss": r"consume_kernel|cross_entropy|SoftMax|nll_loss",
    "matmuls": r"(?i:gemm|cutlass|nvjet|xmma|splitK|cublas)|^linear_step",
    "elementwise": (
        r"forward_kernel|backward_kernel|rotate_kernel|sum_rows|elementwise|reduce|norm|conv|swiglu"
        r"|cast_kernel|amax_kernel|at::native"
    ),
}


class RandomTokens:
    """Dataset of random tokens, for the loader."""

    def __init__(self, vocab_size: int, seq_len: int):
        self._vocab_size, self._seq_len = vocab_size, seq_len

    def sequences(self, indices: np.ndarray) -> Tensor:
        """Return the dataset's sequences `indices`, [n, seq_len] int64."""
        draw = np.random.default_rng(indices)
        return torch.from_numpy(draw.integers(self._vocab_size, size=(len(indices), self._seq_len)))


def run(options: Namespace, report: Report, compose: Compose) -> None:
    """Measure our model and the peers on the sizes of the config.

    Raises:
        ValueError: the config is wrong, or no model could be measured.
    """
    config = compose(["launch.num_processes=1", *options.overrides, *UNUSED])
    if config.launch.num_machines != 1 or config.task is not None:
        raise ValueError("fla-bench train measures language models on one machine: no task, num_machines=1")
    config = resolve(config).config
    trainer, processes = config.trainer, config.launch.num_processes
    report.print(
        f"{WARM_UP} + {options.steps} + 1 steps; {config.num_accumulated} micro-batches of "
        f"{trainer.micro_batch_size} x {trainer.seq_len} tokens on each of {processes} processes "
        "(trainer.global_batch_tokens, .micro_batch_size, .seq_len)"
    )
    ceilings = None if config.launch.device == "cpu" else report.ceilings
    rows = report.table("rows", COLUMNS, _rows(options, config, ceilings))
    if all("note" in row for row in rows):
        raise ValueError(rows[0]["note"])
    if any(row.get("times") for row in rows):
        report.table("times", TIMES, _time_rows(rows))


def _rows(options: Namespace, config: TrainConfig, ceilings: Ceilings | None) -> Iterator[Row]:
    processes = config.launch.num_processes
    threads = max(1, torch.get_num_threads() // processes)
    for name in ("ours", *options.peers):
        if config.launch.context_parallel > 1 and name != "ours":
            yield {"model": name, "note": "peers need launch.context_parallel=1"}
            continue
        try:
            yield on_ranks(processes, measure, config, name, ceilings, options.steps, threads)
        except RuntimeError as failure:
            yield {"model": name, "note": " ".join(str(failure).split())[:200]}


def measure(config: TrainConfig, name: str, ceilings: Ceilings | None, steps: int, threads: int) -> Row:
    """Measure one model as the rank that the environment names, in a process that has no group yet.

    `times` of the row are the milliseconds of one more step by kind of work, on a GPU. "data" is the host's
    wait in a timed step. Communication counts in full, whether it overlaps or waits.
    """
    torch.set_num_threads(threads)
    # Peers run without a CUDA graph. Other features belong to a run's data or states.
    supported = (Float8, CudaGraph) if name == "ours" else Float8
    features = [feature for feature in features_of(config) if isinstance(feature, supported)]
    graph = any(isinstance(feature, CudaGraph) for feature in features)
    engine = _engine(config, name, preserve_rng_state=not graph)
    for feature in features:
        feature.attach(SimpleNamespace(model=engine.module, config=config))
    device, trainer, ranks = engine.device, config.trainer, dist.get_world_size()
    bad_steps = BadSteps(device, max_grad_norm=config.optimizer.max_grad_norm)
    mesh = RankMesh(config.launch.context_parallel)
    global_batch = config.num_accumulated * trainer.micro_batch_size * mesh.data_world
    plan = BatchSampler(global_batch, trainer.micro_batch_size, mesh.data_rank, mesh.data_world)
    tokens = plan.global_batch * trainer.seq_len
    with PrefetchLoader(RandomTokens(config.model["vocab_size"], trainer.seq_len), plan) as sequences:

        def batch() -> list[Batch]:
            return [to_batch(next(sequences), device, mesh.context) for _ in range(plan.accumulation)]

        def step(micro_batches: list[Batch]) -> Outcome:
            return train_step(engine, micro_batches, config.optimizer.lr, bad_steps, features=features)

        start = time.perf_counter()
        step(batch()).read()
        first_step_s = time.perf_counter() - start
        for _ in range(WARM_UP - 1):
            step(batch()).read()

        flops = training_flops(name, engine.module, config)
        peak = ranks * ceilings.flops if ceilings and flops else None
        throughput = Throughput(flops or 0.0, peak, device)
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
            raise ValueError("the loss or a gradient was not finite")
        times = {}
        if device.type == "cuda":
            times = breakdown(lambda: step(batch()).read())
            times["data"] = speed["data_wait"] * 1e3 * tokens / speed["tokens_per_second"]
    step_ms = 1e3 * tokens / speed["tokens_per_second"]
    row = {
        "model": name,
        "processes": ranks,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "tokens_per_step": tokens,
        "first_step_s": first_step_s,
        "step_ms": step_ms,
        "tokens_per_second": speed["tokens_per_second"],
        "MFU_%": 100 * speed["mfu"] if peak else None,
        "times": times,
    }
    # The allocator does not count the pool of a CUDA graph.
    return row if graph else row | {"memory_GiB": speed["memory_gib"]}


def _engine(config: TrainConfig, name: str, *, preserve_rng_state: bool):
    """Build the model on this rank's device and wrap it in an engine."""
    torch.manual_seed(config.seed)
    if config.launch.device == "cpu":  # also on a machine with GPUs
        os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device(config.launch.device):  # drawing 1.5B weights on a CPU would be slow
        model = build(name, config)
    mode = config.trainer.activation_checkpointing
    checkpoint_activations(model, mode, preserve_rng_state=preserve_rng_state)
    return build_engine(model.float(), config)


def breakdown(run: Callable[[], object]) -> dict[str, float]:
    """Return the milliseconds of `run` on the GPU by kind. Overlapping streams count in full."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(file))
        return by_kind(json.loads(file.read_text())["traceEvents"])


def by_kind(events: Sequence[dict]) -> dict[str, float]:
    """Return the milliseconds by kind of the events of a Chrome trace, which have microseconds."""
    times = Counter()
    for event in events:
        if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
            times["copies"] += event["dur"] / 1e3
        elif event.get("cat") == "kernel":
            matches = (kind for kind, pattern in GPU_KERNELS.items() if re.search(pattern, event["name"]))
            times[next(matches, "other")] += event["dur"] / 1e3
    return dict(times.most_common())


def _time_rows(rows: Sequence[Row]) -> Iterator[Row]:
    for row in rows:
        total = sum(row.get("times", {}).values())
        for kind, ms in row.get("times", {}).items():
            yield {"model": row["model"], "work": kind, "ms": ms, "%_of_the_profiled_step": 100 * ms / total}
