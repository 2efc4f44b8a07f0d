"""Change DeepSpeed's internals (version 0.19.8), with the reason for each change.

- Each change affects one engine, one module attribute or one accelerator object. No file of DeepSpeed is
  edited.
- `tests/training/test_deepspeed_patches.py` has a test for each change that fails once DeepSpeed no longer
  needs it.
"""

import torch
import torch.distributed as dist


def skip_cpu_operator() -> None:
    """Keep DeepSpeed from compiling a shared-memory operator: 30 s, and an error without a compiler."""
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def skip_muon_compilation() -> None:
    """Keep DeepSpeed from importing a compiler for its Muon, which is not used here: a second per rank."""
    from deepspeed.runtime import compiler

    compiler.compile = lambda: lambda function: function


def ask_cuda_for_free_memory() -> None:
    """Keep DeepSpeed from asking NVML how much memory is free.

    It parses CUDA_VISIBLE_DEVICES as numbers, which fails where a scheduler writes UUIDs.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]


def leave_gradients(engine) -> None:
    """Leave gradients where autograd accumulates them, until `reduce_gradients`.

    DeepSpeed's hooks copy and reduce each parameter's gradient in Python after every micro-batch, a third of
    the host's time of a step (docs/dev/log.md). Without the hooks a rank holds whole gradients, 4 bytes per
    parameter, instead of its partition. The peak comes after the backward pass, once activations are freed.
    """
    engine.enable_backward_allreduce = False
    for hook in engine.optimizer._grad_acc_hooks:
        hook.remove()


def share_masters(zero) -> None:
    """Use this rank's partition of the weights, which are fp32, as its fp32 masters.

    DeepSpeed keeps both and copies the masters after each step. That costs 4 bytes per parameter over all
    ranks, and 1.1 ms per step of a 340M model on one H100 (docs/dev/log.md). With shared memory its copies
    launch no kernel.
    """
    masters = zip(zero.single_partition_of_fp32_groups, zero.parallel_partitioned_bit16_groups, strict=True)
    for master, partitions in masters:
        master.data = partitions[dist.get_rank()]
    zero._link_all_hp_params()  # views of the old copies would keep their memory


def reduce_gradients(zero) -> None:
    """Sum the ranks' gradients of a step and give each rank its partition in fp32, as the hooks would.

    The sum is computed in `communication_data_type`, to which each rank rounds its accumulated gradients
    once. It is not divided by the number of ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for i, group in enumerate(zero.bit16_groups):
        size = zero.partition_size[i]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group]
        flat = torch.empty(size * world, dtype=zero.communication_data_type, device=group[0].device)
        sizes = [p.numel() for p in group]
        *pieces, padding = flat.split([*sizes, len(flat) - sum(sizes)])
        torch._foreach_copy_([x.view_as(p) for x, p in zip(pieces, group, strict=True)], gradients)
        padding.zero_()
        del gradients
        zero.free_grad_in_param_list(group)
        partition = flat[rank * size : (rank + 1) * size]
        if world > 1:
            dist.reduce_scatter_tensor(partition, flat)
        zero.averaged_gradients[i] = [partition.float()]
