"""The DeepSpeed ZeRO-2 engine: one place sets every value, and nothing is "auto".

Parameters, gradients, their accumulation and their reduction are fp32. `bf16` runs the forward pass under
torch's autocast: matrix products in bf16, while A_log, dt_bias, norms, gates and states, which the model
keeps out of autocast, stay fp32.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.training.optimizer import build_optimizer
from fla_train.training.schema import TrainConfig
from fla_train.training.validate import accumulation_steps, resolve_device

BUCKET_ELEMENTS = 50_000_000  # gradient elements reduced at once: 200 MB of fp32
TIMEOUT = timedelta(minutes=30)


@dataclass
class StepResult:
    """Outcome of one optimizer step, equal on all ranks."""

    loss: float  # nats per target token, mean over the global batch
    grad_norm: float  # before clipping
    targets: int  # target tokens of the global batch
    skipped: bool  # nothing was updated: the loss or a gradient was not finite


def deepspeed_config(config: TrainConfig, *, on_gpu: bool) -> dict:
    """The whole DeepSpeed config. Accumulation follows from the batch, which `validate` has checked."""
    trainer = config.trainer
    return {
        "train_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps(config),
        "gradient_clipping": config.optimizer.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # torch's AdamW is outside DeepSpeed's list
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": on_gpu,  # gloo has no streams to overlap
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "round_robin_gradients": False,  # restores wrong weights on another number of ranks
        },
        "bf16": {"enabled": False},  # would cast every parameter, A_log and dt_bias too
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": trainer.precision == "bf16",
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # modules listed here get their gradients reduced in bf16
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "steps_per_print": 2**62,  # metrics are ours
        "wall_clock_breakdown": False,
    }


def build_engine(model: nn.Module, config: TrainConfig):
    """Join the process group and wrap `model` and its optimizer by accelerate in a DeepSpeed engine.

    RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT must be set. Learning rate, data and checkpoints
    stay ours: accelerate's scheduler steps once per process, and its loader state is not per rank. Ranks come
    from torch.distributed only: on a CPU accelerate may see one process whatever their number.
    """
    on_gpu = resolve_device(config) == "cuda"
    if not on_gpu:
        _skip_cpu_operator()
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    settings = deepspeed_config(config, on_gpu=on_gpu)
    process_group = InitProcessGroupKwargs(timeout=TIMEOUT)
    if not on_gpu:  # accelerate finds no backend by itself
        process_group.backend = "gloo"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        kwargs_handlers=[process_group],
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    model.to(device)
    engine, _ = accelerator.prepare(model, build_optimizer(model, config.optimizer))
    assert dist.get_world_size() == config.launch.num_processes
    assert engine.gradient_accumulation_steps() == settings["gradient_accumulation_steps"]
    return engine


def train_step(engine, micro_batches: Sequence[tuple[Tensor, Tensor]], learning_rate: float) -> StepResult:
    """One optimizer step on this rank's (input_ids, labels) pairs, each [B, T] int64 on the engine's device.

    The gradient is that of (sum of the target tokens' losses) / (their number), both over all ranks and
    micro-batches. DeepSpeed averages over ranks, so each micro-batch's sum is divided by number / ranks; its
    division by the accumulation steps is turned off.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate
    skipped_before = engine.skipped_steps
    targets = torch.stack([(labels[:, 1:] != -100).sum() for _, labels in micro_batches]).sum()
    dist.all_reduce(targets)
    divisor = targets.clamp(min=1) / dist.get_world_size()
    total = torch.zeros((), device=targets.device, dtype=torch.float64)
    engine.train()
    for i, (input_ids, labels) in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
        loss = engine(input_ids=input_ids, labels=labels, num_items_in_batch=divisor, use_cache=False).loss
        engine.backward(loss, scale_wrt_gas=False)
        total += loss.detach().double()
    engine.step()
    dist.all_reduce(total)
    return StepResult(
        loss=(total / dist.get_world_size()).item(),
        grad_norm=float(engine.get_global_grad_norm()),
        targets=int(targets),
        skipped=engine.skipped_steps > skipped_before,
    )


@torch.no_grad()
def mean_loss(engine, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Mean loss per target token over all ranks' batches, which may differ in number."""
    device = engine.device
    sums = torch.zeros(2, device=device, dtype=torch.float64)  # sum of losses, target tokens
    one = torch.ones((), device=device)
    engine.eval()
    for input_ids, labels in batches:
        loss = engine(input_ids=input_ids, labels=labels, num_items_in_batch=one, use_cache=False).loss
        sums += torch.stack([loss.double(), (labels[:, 1:] != -100).sum().double()])
    engine.train()
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def _skip_cpu_operator() -> None:
    """Keep DeepSpeed from compiling a shared-memory operator: half a minute, and fatal without a compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
