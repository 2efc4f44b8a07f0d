"""The DeepSpeed ZeRO-2 engine with its settings, none of them "auto", and `train_step`: one optimizer step.

Parameters, gradients and their accumulation are fp32, and so is their reduction unless
`trainer.gradient_reduction` says bf16. The precision `bf16` runs the forward pass under torch's autocast:
matrix products in bf16, while A_log, dt_bias, norms, gates and states, which the model keeps out of
autocast, stay fp32. `fp8` is `bf16` with linear layers in float8, see `models.float8`.
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
from fla_train.models.carried_states import CarriedStates
from fla_train.models.float8 import Float8Weights
from fla_train.training import deepspeed_patches
from fla_train.training.bad_steps import BadStepFilter
from fla_train.training.config import TrainConfig, accumulation_steps, resolve_device, with_processes
from fla_train.training.cuda_graph import CudaGraphPass, gradients_of
from fla_train.training.initial_states import InitialStates
from fla_train.training.optimizer import FlatAdamW, build_optimizer
from fla_train.training.process_group import join

logger = logging.getLogger(__name__)
BUCKET_ELEMENTS = 50_000_000  # elements gathered, or with overlap reduced, at once: 200 MB of fp32


@dataclass
class StepResult:
    """Outcome of one optimizer step, equal on all ranks."""

    loss: float  # nats per target token, mean over the global batch
    grad_norm: float  # before clipping
    targets: int  # target tokens of the global batch
    skipped: bool  # nothing was updated: the loss or a gradient was not finite, or the loss a spike
    stop: bool  # a rank got a request to stop


class Outcome:
    """A `StepResult` on its way to the host: its numbers follow the step's kernels in the device's queue.

    Args:
        values: loss, gradient norm, targets, skipped, ranks with a request to stop; [5] fp64 on the device.
    """

    def __init__(self, values: Tensor):
        self._values = values.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if values.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def read(self) -> StepResult:
        """Wait until the step has ended, but for none that was launched after it."""
        if self._copied is not None:
            self._copied.synchronize()
        loss, norm, targets, skipped, stop = self._values.tolist()
        return StepResult(loss, norm, int(targets), bool(skipped), stop > 0)


def deepspeed_config(config: TrainConfig, *, on_gpu: bool) -> dict:
    """The whole DeepSpeed config. Accumulation follows from the batch, which `validate` has checked."""
    trainer, launch = config.trainer, config.launch
    overlap = on_gpu and launch.num_processes > 1 and launch.overlap_communication  # gloo has no streams
    return {
        "train_micro_batch_size_per_gpu": trainer.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps(config),
        "gradient_clipping": 0.0,  # `train_step` clips and skips, without waiting for the device
        "gradient_allreduce_op": "sum",  # `train_step` divides the loss, not DeepSpeed each gradient
        "zero_allow_untested_optimizer": True,  # torch's AdamW is outside DeepSpeed's list
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": overlap,
            # Of overlap_comm: the host would wait for the device before each reduction to one rank.
            "use_multi_rank_bucket_allreduce": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "compute_grad_norm": False,
            "round_robin_gradients": False,  # restores wrong weights on another number of ranks
            "load_from_fp32_weights": False,  # the masters come from the weights, which are fp32 too
        },
        "bf16": {"enabled": False},  # would cast every parameter, A_log and dt_bias too
        "fp16": {"enabled": False},
        "torch_autocast": {
            "enabled": trainer.autocasts,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],  # `reduce_in_bf16` names all parameters
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": trainer.gradient_reduction if launch.num_processes > 1 else "fp32",
        "steps_per_print": 2**62,  # metrics are ours
        # It would wait for the device before each micro-batch and after each step.
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "wall_clock_breakdown": False,
    }


def build_engine(model: nn.Module, config: TrainConfig):
    """Join the other ranks, unless that has been done, and wrap `model` and its optimizer in an engine.

    The environment is that of a rank, as `join` reads it. Learning rate, data and checkpoints
    stay ours: accelerate's scheduler steps once per process, and its loader state is not per rank. Ranks come
    from torch.distributed only: on a CPU accelerate may see one process whatever their number.
    """
    config = with_processes(config)
    on_gpu = resolve_device(config) == "cuda"
    if on_gpu:
        deepspeed_patches.ask_cuda_for_free_memory()
    else:
        deepspeed_patches.skip_cpu_operator()
    deepspeed_patches.skip_muon_compilation()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]  # `accelerate launch` sets them; the engine is as our config says
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    settings = deepspeed_config(config, on_gpu=on_gpu)
    device = join(on_gpu=on_gpu)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings),
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        kwargs_handlers=[
            InitProcessGroupKwargs(backend=dist.get_backend())
        ],  # on a CPU accelerate finds none by itself
    )
    model.to(device)
    if config.trainer.precision == "fp8":
        model.float8 = Float8Weights(model)
    if settings["communication_data_type"] == "bf16":
        deepspeed_patches.reduce_in_bf16(model)
    optimizer = build_optimizer(model, config.optimizer, separate_gradients=config.launch.num_processes == 1)
    engine, _ = accelerator.prepare(model, optimizer)
    assert dist.get_world_size() == config.launch.num_processes
    assert engine.gradient_accumulation_steps() == settings["gradient_accumulation_steps"]
    deepspeed_patches.share_masters(engine.optimizer)
    if not engine.optimizer.overlap_comm:
        deepspeed_patches.leave_gradients(engine)
    if isinstance(optimizer, FlatAdamW):
        deepspeed_patches.step_with_separate_gradients(engine.optimizer)
    return engine


def train_step(
    engine,
    micro_batches: Sequence[Batch | tuple[Tensor, Tensor]],
    learning_rate: float,
    bad_steps: BadStepFilter,
    *,
    stop: bool = False,
    cuda_graph: CudaGraphPass | None = None,
    states: InitialStates | None = None,
) -> Outcome:
    """One optimizer step on this rank's micro-batches: input_ids and labels, each [B, T] int64 on the
    engine's device, or further fields of `Batch`.

    The gradient is that of (sum of the target tokens' losses) / (their number), both over all ranks and
    micro-batches. Gradients are added up: DeepSpeed's divisions by ranks and micro-batches are turned off.

    Args:
        bad_steps: scales a large gradient down, or has the step skipped; both happen in the optimizer's
        kernel.
        stop: this rank's wish to stop, which all ranks learn together.
        cuda_graph: computes the gradients in the engine's place, of one rank's one micro-batch, unless the
        pass can't be recorded.
        states: what the rows start from in place of zeros, made for this step by `begin`.

    Returns:
        The outcome, for which nothing here waits.
    """
    zero = engine.optimizer
    for group in zero.param_groups:
        group["lr"] = learning_rate
    targets = torch.stack([(Batch(*batch).targets() != -100).sum() for batch in micro_batches]).sum()
    dist.all_reduce(targets)
    divisor = targets.clamp(min=1)
    # The summed loss, and the ranks that want to stop
    sums = torch.tensor([0.0, float(stop)], dtype=torch.float64).to(targets.device, non_blocking=True)
    if hasattr(engine.module, "float8"):
        engine.module.float8.cast()
    engine.train()
    for i, batch in enumerate(micro_batches):
        engine.set_gradient_accumulation_boundary(i == len(micro_batches) - 1)
        inputs = _inputs(batch, divisor, None if states is None else states.passes[i])
        loss = None if cuda_graph is None else cuda_graph(inputs)
        if loss is None:
            loss = engine(**inputs, use_cache=False).loss
            with deepspeed_patches.wait_on_stream(zero):
                engine.backward(loss, scale_wrt_gas=False)
        if states is not None:
            states.end_pass(i)
        sums[0] += loss.detach().double()
    if states is not None:
        states.end_step()
    if isinstance(zero.optimizer, FlatAdamW):
        deepspeed_patches.collect_gradients(zero)
    elif not zero.overlap_comm:
        deepspeed_patches.reduce_gradients(zero)
    dist.all_reduce(sums)
    loss = sums[0]
    grad_norm = _grad_norm(zero.averaged_gradients)
    zero.optimizer.grad_scale, zero.optimizer.found_inf = bad_steps.check(loss, grad_norm)
    engine.step()
    skipped = zero.optimizer.found_inf
    return Outcome(torch.stack([loss, grad_norm, targets.double(), skipped.double(), sums[1]]))


def precompile_step(
    engine, batch: Batch | tuple[Tensor, Tensor], threads: int, states: InitialStates | None = None
) -> None:
    """Compile the Triton kernels of a micro-batch's forward and backward pass, several at once.

    Weights, gradients and random state stay as they are. What fails here, fails in the step: it is only
    logged.

    Args:
        batch: as one of `train_step`.
        states: as of `train_step`; learn their shapes here.
        threads: as of `precompile`.
    """
    engine.train()
    leaves = {name: p.detach().requires_grad_() for name, p in engine.module.named_parameters()}
    divisor = torch.ones((), dtype=torch.int64, device=engine.device)

    def work() -> tuple[Tensor, Sequence[Tensor | None]]:
        if states is not None:
            states.prepare(engine, batch)
        inputs = _inputs(batch, divisor, None if states is None else states.passes[0])
        return gradients_of(engine.module, leaves, inputs, bf16=engine.torch_autocast_enabled())

    try:
        precompile(work, threads)
    except Exception as error:
        logger.warning("kernels are compiled one by one (%s: %s)", type(error).__name__, error)


def _inputs(
    batch: Batch | tuple[Tensor, Tensor], divisor: Tensor, states: CarriedStates | None
) -> dict[str, Any]:
    """A micro-batch as keyword arguments of the model, which divides the summed loss by `divisor`."""
    given = dict(zip(Batch._fields, batch, strict=False))
    given.pop("continues", None)
    given |= {"num_items_in_batch": divisor, "states": states}
    return {name: x for name, x in given.items() if x is not None}


def _grad_norm(gradients: Mapping[int, Sequence[Tensor]]) -> Tensor:
    """Norm of all ranks' gradients, fp64 on the device, from this rank's partition of each group.

    DeepSpeed's own copies a constant to the device, for which the host waits. A CPU adds the squares in
    turn, which in fp32 is 0.2% off for an embedding of 33M weights; a GPU adds them in a tree.
    """
    pieces = [piece for group in gradients.values() for piece in group]
    if pieces and not pieces[0].is_cuda:
        pieces = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    square = torch.nn.utils.get_total_norm(pieces).double().square()
    dist.all_reduce(square)
    return square.sqrt()
