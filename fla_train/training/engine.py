"""Build the DeepSpeed ZeRO-2 engine with every setting explicit, and take one optimizer step (`train_step`).

Parameters, gradients and their accumulation are fp32, and so is their reduction unless
`trainer.gradient_reduction` says bf16. The precision `bf16` runs the forward pass under torch's autocast:
matrix products in bf16, while A_log, dt_bias, norms, gates and states, which the model keeps out of
autocast, stay fp32. `fp8` is `bf16` with linear layers in float8, see `features.float8`.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fla_train.data.sampler import Batch
from fla_train.kernels.precompile import precompile
from fla_train.training import deepspeed_patches
from fla_train.training.callback import Callback
from fla_train.training.config import TrainConfig
from fla_train.training.features.bad_steps import BadSteps
from fla_train.training.optimizer import build_optimizer
from fla_train.training.process_group import join
from fla_train.training.recorded_pass import gradients_of

logger = logging.getLogger(__name__)
# Elements that are gathered at once: 200 MB of fp32.
BUCKET_ELEMENTS = 50_000_000


@dataclass
class StepResult:
    """Hold the result of one optimizer step, equal on all ranks."""

    # Mean over the global batch in nats per target token, without the terms that callbacks add.
    loss: float
    grad_norm: float  # norm before clipping
    targets: int  # number of target tokens of the global batch
    # Whether the update was skipped, because loss or gradient was not finite or the loss spiked.
    skipped: bool
    stop: bool  # whether a rank was asked to stop


class HostTransfer:
    """Copy scalars from the device to the host, after the kernels that are queued so far."""

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> list[float]:
        """Wait until the copy has arrived, but not for kernels that were queued after it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values.tolist()


class Outcome(HostTransfer):
    """Hold a `StepResult` that is being copied to the host.

    Args:
        values: loss, gradient norm, targets, skipped, ranks that were asked to stop; [5] fp64 on the device.
    """

    def read(self) -> StepResult:
        """Wait for the end of this step, but not for later steps, and return its result."""
        loss, norm, targets, skipped, stop = super().read()
        return StepResult(loss, norm, int(targets), bool(skipped), stop > 0)


def deepspeed_config(config: TrainConfig) -> dict:
    """Return the whole DeepSpeed config. The batch, which `resolve` has checked, sets the accumulation."""
    trainer, launch = config.trainer, config.launch
    return {
        "train_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "gradient_accumulation_steps": config.num_accumulated,
        # `train_step` clips and skips without waiting for the device.
        "gradient_clipping": 0.0,
        "gradient_allreduce_op": "sum",  # `train_step` divides the loss; DeepSpeed would divide each gradient
        "zero_allow_untested_optimizer": True,  # DeepSpeed's list has no AdamW of torch
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "compute_grad_norm": False,
            # Round robin restores wrong weights on another number of ranks.
            "round_robin_gradients": False,
        },
        "bf16": {"enabled": False},  # DeepSpeed would also cast A_log and dt_bias
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": trainer.autocasts,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": trainer.gradient_reduction if launch.num_processes > 1 else "fp32",
        "steps_per_print": 2**62,  # this package logs the metrics
        # The timer would wait for the device before each micro-batch and after each step.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "wall_clock_breakdown": False,
    }


def build_engine(model: nn.Module, config: TrainConfig):
    """Join the other ranks, unless already joined, and wrap `model` and its optimizer in an engine.

    The environment is that of a rank, as `join` reads it. This package handles learning rate, data and
    checkpoints itself, because accelerate's scheduler steps once per process and its loader state is not per
    rank. The number of ranks comes from torch.distributed only: on a CPU accelerate may see a single process.
    """
    on_gpu = config.launch.device == "cuda"
    if on_gpu:
        deepspeed_patches.ask_cuda_for_free_memory()
    else:
        deepspeed_patches.skip_cpu_operator()
    deepspeed_patches.skip_muon_compilation()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        # `accelerate launch` sets these variables, but only our config decides about the engine.
        del os.environ[name]
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    settings = deepspeed_config(config)
    device = join(on_gpu=on_gpu)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        # On a CPU accelerate does not detect the backend.
        kwargs_handlers=[InitProcessGroupKwargs(backend=dist.get_backend())],
    )
    model.to(device)
    engine, _ = accelerator.prepare(model, build_optimizer(model, config.optimizer))
    assert dist.get_world_size() == config.launch.num_processes
    assert engine.gradient_accumulation_steps() == settings["gradient_accumulation_steps"]
    deepspeed_patches.share_masters(engine.optimizer)
    deepspeed_patches.leave_gradients(engine)
    return engine


def train_step(
    engine,
    micro_batches: Sequence[Batch | tuple[Tensor, Tensor]],
    learning_rate: float,
    bad_steps: BadSteps,
    *,
    stop: bool = False,
    features: Sequence[Callback] = (),
) -> Outcome:
    """Take one optimizer step on this rank's micro-batches. Return its outcome without waiting for it.

    The gradient is that of (sum of the target tokens' losses) / (their number), both over all ranks and
    micro-batches. Gradients are summed: DeepSpeed's divisions by ranks and micro-batches are turned off.

    Args:
        micro_batches: input_ids and labels, each [B, T] int64 on the engine's device, or all of `Batch`.
        bad_steps: decides on clipping and skipping; both happen in the optimizer's kernel.
        stop: whether this rank was asked to stop. All ranks learn it together.
        features: their hooks within the step are called in this order.
    """
    # Set the learning rate.
    zero = engine.optimizer
    for group in zero.param_groups:
        group["lr"] = learning_rate
    engine.train()

    # Count the targets of the global batch, by which each micro-batch's summed loss is divided.
    batches = [Batch(*batch) for batch in micro_batches]
    targets = torch.stack([(batch.targets() != -100).sum() for batch in batches]).sum()
    dist.all_reduce(targets)
    divisor = targets.clamp(min=1)

    # Run forward and backward passes. `sums` holds the loss and the number of ranks that were asked to stop.
    sums = torch.tensor([0.0, float(stop)], dtype=torch.float64).to(targets.device, non_blocking=True)
    for number, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        sums[0] += _run_pass(engine, number, batch, divisor, features).double()
        for feature in features:
            feature.after_backward(number)

    # Sum gradients and losses over ranks. Each rank then holds the gradient of its partition.
    deepspeed_patches.reduce_gradients(zero)
    dist.all_reduce(sums)
    loss, grad_norm = sums[0], gradient_norm(zero.averaged_gradients)

    # Clip, and update the weights unless the step is skipped.
    zero.optimizer.grad_scale, zero.optimizer.found_inf = bad_steps.decide(loss, grad_norm)
    engine.step()
    skipped = zero.optimizer.found_inf
    return Outcome(torch.stack([loss, grad_norm, targets.double(), skipped.double(), sums[1]]))


def _run_pass(engine, number: int, batch: Batch, divisor: Tensor, features: Sequence[Callback]) -> Tensor:
    """Run a micro-batch's forward and backward pass. Return its loss, detached and without added terms."""
    inputs = _inputs(number, batch, divisor, features)
    for feature in features:
        if (loss := feature.run_pass(inputs)) is not None:
            return loss.detach()
    outputs = engine(**inputs, use_cache=False)
    total = loss = outputs.loss
    for feature in features:
        total = feature.after_loss(total, outputs, batch, divisor)
    del outputs  # they may hold logits, whose memory the backward pass can use
    engine.backward(total, scale_wrt_gas=False)
    return loss.detach()


def precompile_step(
    engine, batch: Batch | tuple[Tensor, Tensor], threads: int, features: Sequence[Callback] = ()
) -> None:
    """Compile the Triton kernels of a micro-batch's forward and backward pass, several at once.

    Weights, gradients and random state do not change. A failure is only logged, because the step repeats it.

    Args:
        batch: a micro-batch of `train_step`.
        threads: number of threads of `precompile`.
        features: features that add inputs of the model.
    """
    engine.train()
    leaves = {name: p.detach().requires_grad_() for name, p in engine.module.named_parameters()}
    divisor = torch.ones((), dtype=torch.int64, device=engine.device)
    batch = Batch(*batch)

    def work() -> tuple[Tensor, Sequence[Tensor | None]]:
        inputs = _inputs(0, batch, divisor, features)
        return gradients_of(engine.module, leaves, inputs, bf16=engine.torch_autocast_enabled())

    try:
        precompile(work, threads)
    except Exception as error:
        logger.warning("kernels are compiled one by one (%s: %s)", type(error).__name__, error)


def _inputs(number: int, batch: Batch, divisor: Tensor, features: Sequence[Callback]) -> dict[str, Any]:
    """Return micro-batch `number` as keyword arguments of the model, with those that features add.

    The model divides the summed loss by `divisor`.
    """
    fields = batch._replace(continues=None)._asdict() | {"num_items_in_batch": divisor}
    inputs = {name: value for name, value in fields.items() if value is not None}
    for feature in features:
        inputs |= feature.model_inputs(number, batch)
    return inputs


def gradient_norm(gradients: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Return the norm of all ranks' gradients, fp64 on the device, from this rank's partitions.

    DeepSpeed's computation copies a constant to the device, for which the host waits. A CPU sums squares
    sequentially, which in fp32 is 0.2% off for an embedding of 33M weights, so it uses fp64. A GPU sums in a
    tree.
    """
    pieces = [piece for group in gradients.values() for piece in group]
    if pieces and not pieces[0].is_cuda:
        pieces = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    square = torch.nn.utils.get_total_norm(pieces).double().square()
    dist.all_reduce(square)
    return square.sqrt()
