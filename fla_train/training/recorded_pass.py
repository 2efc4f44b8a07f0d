"""Record a forward and backward pass as a CUDA graph, and replay it."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fla_train.utils.random_states import differing, random_states, set_random_states

WAITED = "synchronizing CUDA operation"  # part of torch's error for an operation that waits


class RecordedPass:
    """Compute loss and gradients of one micro-batch by replaying a recording of the pass.

    Inputs of another shape are recorded again, and so is a model whose parameters have moved. Forward hooks
    and all other Python code of the pass run only while recording. Some passes can't be recorded: those that
    wait for the GPU, draw random numbers on the host, or run a backward pass inside the forward pass.

    Args:
        module: a module on a GPU, in training mode.
        bf16: whether matrix products run in bf16, under autocast.
    """

    def __init__(self, module: nn.Module, *, bf16: bool):
        self._module, self._bf16 = module, bf16
        self._key: tuple | None = None  # shapes and addresses of the recorded pass

    def run(self, inputs: Mapping[str, Any]) -> Tensor:
        """Run the pass on `inputs`, the keyword arguments of the model, and set each parameter's `grad`.

        Values that are not tensors, such as initial states, are recorded as they are, so their tensors must
        keep their addresses.

        Returns:
            The loss, an fp32 scalar, valid until the next call like the gradients.

        Raises:
            ValueError: the pass can't be recorded.
        """
        parameters = dict(self._module.named_parameters())
        fixed = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        inputs = {name: value for name, value in inputs.items() if name not in fixed}
        shapes = ((name, value.shape) for name, value in inputs.items())
        objects = ((name, id(value)) for name, value in fixed.items())
        key = (*shapes, *objects, *(parameter.data_ptr() for parameter in parameters.values()))
        if key != self._key:
            self._fixed = fixed
            self._record(inputs, parameters)
            self._key = key
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
        for parameter, gradient in zip(parameters.values(), self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _record(self, inputs: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        # Free the memory of the old graph.
        self._key = self._graph = self._loss = self._gradients = None
        self._inputs = {name: value.clone() for name, value in inputs.items()}
        # Use new leaves in the old memory. The nodes that accumulate the parameters' gradients were created
        # on the default stream, on which nothing in a recording may depend.
        leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
        arguments = self._inputs | self._fixed
        device = next(iter(leaves.values())).device
        with side_stream(device) as stream:
            self._warm_up(leaves, arguments, device)
        self._capture(leaves, arguments, stream)

    def _warm_up(
        self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], device: torch.device
    ) -> None:
        """Run the pass three times, so that compilation, tuning and first allocations are not recorded.

        Raises:
            ValueError: names what the pass does that a recording would not repeat.
        """
        states = random_states()
        for _ in range(2):
            gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        before, waits = random_states(), False
        try:
            with waiting_forbidden(device):
                gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            waits = True
        drawn = differing(before, random_states())
        set_random_states(states)
        redrawn = drawn and any(getattr(x, "gradient_checkpointing", False) for x in self._module.modules())
        accumulated = any(leaf.grad is not None for leaf in leaves.values())
        obstacles = {
            "waits for the GPU, for example to read a value": waits,
            "draws random numbers on the host": drawn - {"cuda"},
            "draws random numbers (dropout?), and its recomputed layers would draw others": redrawn,
            "adds to gradients by a backward pass inside its forward pass": accumulated,
        }
        for obstacle, met in obstacles.items():
            if met:
                raise ValueError(f"the model {obstacle}, so set trainer.cuda_graph=false")

    def _capture(
        self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], stream: torch.cuda.Stream | None
    ) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, make CUDA calls that a capture forbids only in its thread.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                recorded = gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the model's pass can't be recorded as a CUDA graph ({reason}): set trainer.cuda_graph=false"
            ) from error
        torch.cuda.current_stream().wait_stream(stream)
        self._graph, (self._loss, self._gradients) = graph, recorded


def gradients_of(
    module: nn.Module, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any], *, bf16: bool
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Return the loss of `module` with `leaves` as parameters, and its gradient or None for each of them."""
    device = next(iter(leaves.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        arguments = dict(inputs, use_cache=False)
        loss = functional_call(module, dict(leaves), (), arguments).loss
    return loss.detach(), torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Run on a second stream of the GPU inside the `with` block, ordered after and before the current one.

    It yields the stream, or None on a CPU.
    """
    if device.type != "cuda":
        yield None
        return
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield stream
    current.wait_stream(stream)


@contextmanager
def waiting_forbidden(device: torch.device) -> Iterator[None]:
    """Forbid operations that wait for a GPU inside the `with` block, as a capture does.

    Most of them raise `RuntimeError`. After a capture that fails, the GPU's random generator raises errors.
    """
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(action="ignore"):  # it warns that it does not detect all of them
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
