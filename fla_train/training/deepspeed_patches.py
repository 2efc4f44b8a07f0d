"""Every change to DeepSpeed's internals: what it does, why, and the version it was seen on.

Each changes one engine, one module attribute or one accelerator object; no file of DeepSpeed is edited.
`tests/training/test_deepspeed_patches.py` has a test for each that fails once DeepSpeed no longer needs it.
All were seen on DeepSpeed 0.19.8.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fla_train.training.optimizer import views_like


def skip_cpu_operator() -> None:
    """Keep DeepSpeed from compiling a shared-memory operator: half a minute, and fatal without a compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def skip_muon_compilation() -> None:
    """Keep DeepSpeed from importing a compiler for a Muon of its own, not used here: a second per rank."""
    from deepspeed.runtime import compiler

    compiler.compile = lambda: lambda function: function


def ask_cuda_for_free_memory() -> None:
    """Keep DeepSpeed from asking NVML how much memory is free.

    It would look for the GPU's number in CUDA_VISIBLE_DEVICES, where schedulers may write UUIDs, and fail.
    """
    from deepspeed.accelerator import get_accelerator

    # Hides the method of its class.
    get_accelerator().available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]


def leave_gradients(engine) -> None:
    """Leave gradients where autograd adds them up, until `reduce_gradients`.

    DeepSpeed's hooks copy and reduce each parameter's gradient in Python, after every micro-batch. That
    takes a third of the host's time of a step (docs/dev/log.md). Without the hooks a rank holds whole
    gradients, 4 bytes a parameter, instead of its partition. They peak after the backward pass, once
    activations are freed.
    """
    engine.enable_backward_allreduce = False
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()


def share_masters(zero) -> None:
    """Have this rank's fp32 masters be its partitions of the weights, which are fp32 too, and no copies.

    DeepSpeed keeps both and copies the masters after each step: 4 bytes a parameter over all ranks, and
    1.1 ms a step of a 340M model on one H100 (docs/dev/log.md). Its copies have one source and target now,
    and end without a kernel.
    """
    masters = zip(zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True)
    for master, partitions in masters:
        master.data = partitions[dist.get_rank()]
    zero._link_all_hp_params()  # its views of the copies would keep their memory


def step_with_separate_gradients(zero) -> None:
    """Have one rank's `FlatAdamW` read the gradients of `collect_gradients` where autograd left them.

    DeepSpeed's step takes a flat gradient of each group. The copy into it takes 1.3 ms of a 340M model's step
    on one H100 (docs/dev/log.md), and 4 bytes a parameter until the step's end.
    """

    def step(closure: None = None) -> None:
        for i, group in enumerate(zero.optimizer.param_groups):
            group["gradients"] = zero.averaged_gradients[i]
        zero.optimizer.step()
        for i, group in enumerate(zero.optimizer.param_groups):
            del group["gradients"]
            zero.averaged_gradients[i] = None
        zero._lazy_init_hp_params_optimizer_state()  # as DeepSpeed's own step ends

    zero.step = step  # hides the method of its class


def reduce_in_bf16(model: nn.Module) -> None:
    """Have DeepSpeed's hooks reduce the gradients of all parameters in bf16.

    Under torch's autocast they ignore `communication_data_type` and read an attribute of each parameter,
    which the config sets for classes of modules only.
    """
    for parameter in model.parameters():
        parameter.comm_dtype = torch.bfloat16


def collect_gradients(zero) -> None:
    """Give one rank's `FlatAdamW` a gradient per parameter: contiguous, zeros where there is none.

    Gradients of a CUDA graph may have any strides, and two parameters may share one tensor.
    """
    assert dist.get_world_size() == 1
    taken = set()
    for i, group in enumerate(zero.bit16_groups):
        zero.averaged_gradients[i] = []
        for p in group:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
            if gradient.data_ptr() in taken:
                gradient = gradient.clone()
            taken.add(gradient.data_ptr())
            zero.averaged_gradients[i].append(gradient)


def reduce_gradients(zero) -> None:
    """Add up the ranks' gradients of a step and give each rank its partition, as DeepSpeed's hooks would.

    The sum is taken in `communication_data_type`, to which each rank rounds its accumulated gradients once.
    Nothing is divided by the number of ranks. The partition is fp32.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for i, group in enumerate(zero.bit16_groups):
        size = zero.partition_size[i]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.empty(size * world, dtype=zero.communication_data_type, device=group[0].device)
        flat[sum(p.numel() for p in group) :].zero_()
        torch._foreach_copy_(views_like(gradients, flat), gradients)
        del gradients
        zero.free_grad_in_param_list(group)
        partition = flat[rank * size : (rank + 1) * size]
        if world > 1:
            dist.reduce_scatter_tensor(partition, flat)
        zero.averaged_gradients[i] = [partition.float()]


@contextmanager
def wait_on_stream(zero) -> Iterator[None]:
    """Inside, where DeepSpeed's host waits for the device, the compute stream waits for the reductions.

    With `overlap_comm` the host waits after each backward pass until all kernels have ended, so that none is
    queued when the next step begins (8% of a 340M step on four GPUs, docs/dev/log.md). What follows, clearing
    gradients and giving their memory back, is in order on the compute stream.
    """
    if not zero.overlap_comm:
        yield
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()

    def wait(*_: object) -> None:
        accelerator.current_stream().wait_stream(zero.reduction_stream)

    accelerator.synchronize = wait  # hides the method of its class
    try:
        yield
    finally:
        del accelerator.synchronize


@contextmanager
def files_through(engine, checkpoint_engine) -> Iterator[None]:
    """Inside, `engine` saves and loads its files through `checkpoint_engine`, without a script beside them.

    DeepSpeed's own engine loads pickles without `weights_only=True`, and the choice is not open to others.
    """
    usual = engine.checkpoint_engine
    engine.checkpoint_engine = checkpoint_engine
    engine._copy_recovery_script = lambda folder: None
    try:
        yield
    finally:
        engine.checkpoint_engine = usual
        del engine._copy_recovery_script
