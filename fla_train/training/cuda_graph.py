"""Forward and backward pass as one CUDA graph, where kernels take less time than their launches.

A word problem's model keeps a GPU busy for a millisecond or two of each step, while the host takes several
times as long to launch a hundred kernels and more one by one. Selective activation checkpointing makes the
host slow with large models, too. Recorded once, kernels are launched together.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fla_train.training.config import TrainConfig, resolve_device

logger = logging.getLogger(__name__)
WARM_UP = 3  # passes before one is recorded: compilation, tuning, allocations


def records_graph(config: TrainConfig) -> bool:
    """Whether a run's passes are to be recorded."""
    return config.trainer.cuda_graph and resolve_device(config) == "cuda"


class CudaGraphPass:
    """Loss and gradients of one micro-batch, by replaying a recording of the pass.

    Inputs of another shape are recorded again, and so is a model whose parameters have moved. Forward hooks
    and anything else that Python does in the pass happen while recording only. A pass that waits for the GPU,
    or draws random numbers on the host, can't be recorded: a line says so, and it runs as it is.

    Args:
        module: on a GPU, in training mode.
        bf16: whether matrix products run in bf16, under autocast.
    """

    def __init__(self, module: nn.Module, *, bf16: bool):
        self._module, self._bf16 = module, bf16
        self._key: tuple | None = None  # of what is recorded
        self._recordable = True

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run the pass on `inputs`, the keyword arguments of the model, and set each parameter's `grad`.

        What is no tensor, such as the states to start from, is recorded as it is: its tensors must stay.

        Returns:
            The loss, fp32 scalar; it and the gradients hold until the next call.

        Raises:
            ValueError: the pass draws random numbers, and layers are recomputed.
        """
        parameters = dict(self._module.named_parameters())
        fixed = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        inputs = {name: value for name, value in inputs.items() if name not in fixed}
        shapes = ((name, value.shape) for name, value in inputs.items())
        objects = ((name, id(value)) for name, value in fixed.items())
        key = (*shapes, *objects, *(parameter.data_ptr() for parameter in parameters.values()))
        if self._recordable and key != self._key:
            self._fixed = fixed
            self._record(inputs, parameters)
            self._key = key
        if self._recordable:
            for name, value in inputs.items():
                self._inputs[name].copy_(value)
            self._graph.replay()
        else:
            arguments = inputs | fixed
            self._loss, self._gradients = gradients_of(self._module, parameters, arguments, bf16=self._bf16)
        for parameter, gradient in zip(parameters.values(), self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        self._key = self._graph = self._loss = self._gradients = None  # give the old one's memory back
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        # Leaves of their own, in the same memory: the nodes that collect the parameters' own gradients were
        # made on the default stream, on which nothing that is being recorded may depend.
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        arguments = self._inputs | self._fixed
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self._warm_up(leaves, arguments)
        current.wait_stream(stream)
        if not self._recordable:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, call CUDA for things that a capture forbids in its own thread.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            found = gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        current.wait_stream(stream)
        self._graph, (self._loss, self._gradients) = graph, found

    def _warm_up(self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> None:
        """Run the pass some times, and find out whether it can be recorded."""
        device = next(iter(leaves.values())).device
        before = random_states(device)
        for _ in range(WARM_UP - 1):
            gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        obstacle = None
        try:
            with waiting_forbidden(device):
                gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as waited:
            place = extract_tb(waited.__traceback__)[-1]
            obstacle = f"waits for the GPU in {place.filename}, line {place.lineno} ({waited})"
        after = random_states(device)
        recomputed = any(getattr(part, "gradient_checkpointing", False) for part in self._module.modules())
        if recomputed and not all(map(torch.equal, before, after)):
            raise ValueError(
                "the model draws random numbers (dropout?), and in a CUDA graph recomputed layers draw "
                "others: set trainer.cuda_graph=false or trainer.activation_checkpointing=false"
            )
        if device.type == "cuda" and not torch.equal(before[0], after[0]):
            obstacle = "draws random numbers on the host"
        if obstacle is not None:
            self._recordable = False
            logger.warning("trainer.cuda_graph=true has no effect: the model %s", obstacle)


@contextmanager
def waiting_forbidden(device: torch.device) -> Iterator[None]:
    """Within it operations for which the host waits for a GPU raise `RuntimeError`, as in a capture."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # that it does not find all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def random_states(device: torch.device) -> list[Tensor]:
    """States of the generators that a pass on `device` draws from, that of the host first."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def gradients_of(
    module: nn.Module, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any], *, bf16: bool
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Loss of `module` with `leaves` for its parameters, and its gradient to each; None where it has none."""
    device = next(iter(leaves.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        arguments = dict(inputs, use_cache=False)
        loss = functional_call(module, dict(leaves), (), arguments).loss
    return loss.detach(), torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
