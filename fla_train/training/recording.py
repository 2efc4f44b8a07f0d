"""Forward and backward pass as one CUDA graph: recorded once per batch shape, then replayed by one launch.

The kernels of a model with a few thousand channels take longer than their launches. Those of a model of one
layer with 64 channels take a tenth of that time, and the GPU waits for the host.
"""

import torch
from torch import Tensor, nn

from fla_train.data import Batch
from fla_train.training.engine import forward_backward

WARM_UP = 3  # passes of a shape before it is recorded: compilation, libraries' workspaces


class RecordedPass:
    """`forward_backward` for one rank and one micro-batch per step: replays write gradients, adding to none.

    Batches have no document bounds, whose number differs. A batch of another shape than the one before begins
    a new recording and gives the old one's memory back.
    """

    def __init__(self) -> None:
        self._shape: torch.Size | None = None
        # Of all passes: autograd keeps a parameter's gradients on the stream where it first met them, and a
        # recording must not touch the default one.
        self._stream = torch.cuda.Stream()

    def __call__(self, engine, batch: Batch, divisor: Tensor) -> Tensor:
        """As `forward_backward`. The loss that is returned holds until the next call."""
        if batch.input_ids.shape != self._shape:
            self._shape, self._passes, self._graph = batch.input_ids.shape, 0, None
            self._held: list[Tensor] = []
            self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._passes += 1
        self._stream.wait_stream(torch.cuda.current_stream())
        if self._passes <= WARM_UP:
            with torch.cuda.stream(self._stream):
                loss = forward_backward(engine, batch, divisor)
        else:
            loss = self._replayed(engine, [batch.input_ids, batch.labels, divisor])
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _replayed(self, engine, read: list[Tensor]) -> Tensor:
        if self._graph is None:
            self._held = [tensor.clone() for tensor in read]
            self._record(engine)
        with torch.cuda.stream(self._stream):
            torch._foreach_copy_(self._held, read)
            self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._loss

    def _record(self, engine) -> None:
        """Nothing is computed here. What the pass allocates stays with the graph.

        Raises:
            ValueError: the pass needs the host in its middle.
        """
        ids, labels, divisor = self._held
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        assert all(p.grad is None for p in parameters), "a replay writes gradients and does not add to them"
        self._graph = torch.cuda.CUDAGraph()
        try:  # the loader and NCCL's watchdog are other threads, which go on meanwhile
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._loss = forward_backward(engine, Batch(ids, labels), divisor)
        except RuntimeError as failure:  # such as a model whose host reads a value from the device
            cause = failure.__context__ or failure  # ending the recording fails, too, and says nothing
            raise ValueError(
                "this model's pass cannot be recorded as a CUDA graph: set trainer.cuda_graph=false "
                f"({str(cause).strip().splitlines()[0]})"
            ) from failure
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
