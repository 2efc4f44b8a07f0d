"""Forward and backward pass as one CUDA graph, where kernels take less time than their launches.

A word problem's model keeps a GPU busy for a millisecond or two of each step, while the host takes several
times as long to launch a hundred kernels and more one by one. Selective activation checkpointing makes the
host slow with large models, too. Recorded once, kernels are launched together.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fla_train.training.config import TrainConfig, resolve_device
from fla_train.utils.random_states import differing, random_states, set_random_states

logger = logging.getLogger(__name__)
WAITED = "synchronizing CUDA operation"  # of torch's error for an operation that waits


def records_graph(config: TrainConfig) -> bool:
    """Whether a run asks for its passes to be recorded."""
    return config.trainer.cuda_graph and resolve_device(config) == "cuda"


class CudaGraphPass:
    """Loss and gradients of one micro-batch, by replaying a recording of the pass.

    Inputs of another shape are recorded again, and so is a model whose parameters have moved. Forward hooks
    and anything else that Python does in the pass happen while recording only. Some passes can't be
    recorded: those that wait for the GPU, that draw random numbers on the host, or that run a backward pass
    of their own within it. A warning says so, and from then on the caller runs them.

    Args:
        module: on a GPU, in training mode.
        bf16: whether matrix products run in bf16, under autocast.

    Attributes:
        recordable: False once a pass could not be recorded.
    """

    def __init__(self, module: nn.Module, *, bf16: bool):
        self._module, self._bf16 = module, bf16
        self._key: tuple | None = None  # of what is recorded
        self.recordable = True

    def __call__(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Run the pass on `inputs`, the keyword arguments of the model, and set each parameter's `grad`.

        What is no tensor, such as the states to start from, is recorded as it is: its tensors must stay.

        Returns:
            The loss, fp32 scalar; it and the gradients hold until the next call. None if the pass can't be
            recorded: the caller has to run it.

        Raises:
            ValueError: the pass draws random numbers, and layers are recomputed; or the recording failed.
        """
        parameters = dict(self._module.named_parameters())
        fixed = {name: value for name, value in inputs.items() if not isinstance(value, Tensor)}
        inputs = {name: value for name, value in inputs.items() if name not in fixed}
        shapes = ((name, value.shape) for name, value in inputs.items())
        objects = ((name, id(value)) for name, value in fixed.items())
        key = (*shapes, *objects, *(parameter.data_ptr() for parameter in parameters.values()))
        if self.recordable and key != self._key:
            self._fixed = fixed
            self._record(inputs, parameters)
            self._key = key
        if not self.recordable:
            return None
        for name, value in inputs.items():
            self._inputs[name].copy_(value)
        self._graph.replay()
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
        device = next(iter(leaves.values())).device
        with side_stream(device) as stream:
            obstacle = self._warm_up(leaves, arguments, device)
        if obstacle is None:
            self._capture(leaves, arguments, stream)
            return
        logger.warning("trainer.cuda_graph=true has no effect from here on: the model %s", obstacle)
        self.recordable = False
        del self._inputs, self._fixed, arguments
        torch.cuda.empty_cache()  # frees what is cached for the side stream

    def _warm_up(
        self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], device: torch.device
    ) -> str | None:
        """Run the pass three times, so that what is compiled, tuned and allocated once is not recorded.

        Returns:
            What keeps the pass from being recorded, if anything does.
        """
        states = random_states()
        for _ in range(2):
            gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        before, waits = random_states(), None
        try:
            with waiting_forbidden(device):
                gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        except RuntimeError as error:
            if WAITED not in str(error):
                raise
            waits = f"waits for the GPU in {place_of(error)}"
        drawn = differing(before, random_states())
        set_random_states(states)
        recomputed = any(getattr(part, "gradient_checkpointing", False) for part in self._module.modules())
        if recomputed and drawn:
            raise ValueError(
                "the model draws random numbers (dropout?), and in a CUDA graph recomputed layers draw "
                "others: set trainer.cuda_graph=false or trainer.activation_checkpointing=false"
            )
        if waits is not None:
            return waits
        if drawn - {"cuda"}:
            return "draws random numbers on the host"
        if any(leaf.grad is not None for leaf in leaves.values()):
            return "adds to gradients by a backward pass of its own"
        return None

    def _capture(
        self, leaves: Mapping[str, Tensor], arguments: Mapping[str, Any], stream: torch.cuda.Stream | None
    ) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads, such as NCCL's, call CUDA for things that a capture forbids in its own thread.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                found = gradients_of(self._module, leaves, arguments, bf16=self._bf16)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"the model's pass can't be recorded as a CUDA graph ({reason}): set trainer.cuda_graph=false"
            ) from error
        torch.cuda.current_stream().wait_stream(stream)
        self._graph, (self._loss, self._gradients) = graph, found


@contextmanager
def side_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """A stream beside the current one of a GPU, which waits for it before and after; None on a CPU."""
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
    """Within it most operations for which the host waits for a GPU raise `RuntimeError`, as in a capture."""
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


def place_of(error: Exception) -> str:
    """Where the model's code raised an error in a pass."""
    own, torchs = Path(__file__), Path(torch.__file__).parent
    frames = [
        frame for frame in extract_tb(error.__traceback__) if torchs not in Path(frame.filename).parents
    ]
    if not frames or Path(frames[-1].filename) == own:
        return "its backward pass"
    return f"{frames[-1].filename}, line {frames[-1].lineno}"


def gradients_of(
    module: nn.Module, leaves: Mapping[str, Tensor], inputs: Mapping[str, Any], *, bf16: bool
) -> tuple[Tensor, Sequence[Tensor | None]]:
    """Loss of `module` with `leaves` for its parameters, and its gradient to each; None where it has none."""
    device = next(iter(leaves.values())).device.type
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        arguments = dict(inputs, use_cache=False)
        loss = functional_call(module, dict(leaves), (), arguments).loss
    return loss.detach(), torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
