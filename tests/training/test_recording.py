"""A recorded pass computes what the pass does: its bookkeeping on any machine, the recording on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import engine_steps
import pytest
import torch
from torch import Tensor

from fla_train.cli.app import compose
from fla_train.data import Batch
from fla_train.training import recording
from fla_train.training.engine import forward_backward
from fla_train.training.launch import launch
from fla_train.training.metrics import read_metrics
from fla_train.training.recording import RecordedPass
from fla_train.training.schema import TrainConfig, register, to_config

SHAPES = [(4, 16)] * 6 + [(4, 32)] * 5 + [(2, 32)] * 2 + [(4, 16)] * 5


class Graph:
    """Stands in for a CUDA graph: its replay computes again, from and into the tensors of the recording."""

    def replay(self) -> None:
        self.engine.module.zero_grad(set_to_none=True)
        loss = forward_backward(self.engine, self.batch, self.divisor)
        for tensor, new in zip(self.written, [loss, *(p.grad for p in self.parameters)], strict=True):
            tensor.copy_(new)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of the passes that a `RecordedPass` has run or recorded, with `Graph` for its recordings."""
    shapes, newest = [], SimpleNamespace()

    def run(engine, batch: Batch, divisor: Tensor) -> Tensor:
        shapes.append(batch.input_ids.shape)
        newest.engine, newest.batch, newest.divisor = engine, batch, divisor
        newest.parameters = list(engine.module.parameters())
        loss = forward_backward(engine, batch, divisor)
        newest.written = [loss, *(p.grad for p in newest.parameters)]
        return loss

    @contextmanager
    def record(graph: Graph, **_: object) -> Iterator[None]:
        yield
        vars(graph).update(vars(newest))

    monkeypatch.setattr(recording, "forward_backward", run)
    here = SimpleNamespace(wait_stream=lambda other: None)
    for name, replaced in {
        "CUDAGraph": Graph,
        "graph": record,
        "Stream": lambda: here,
        "current_stream": lambda: here,
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, replaced)
    return shapes


def test_replays_read_the_new_batch_and_shapes_are_recorded_anew(
    make_config: Callable[..., TrainConfig], passes: list[torch.Size]
):
    model = engine_steps.make_model(make_config())
    engine = SimpleNamespace(module=model, optimizer=SimpleNamespace(overlap_comm=False))
    engine = type("Engine", (SimpleNamespace,), {"__call__": lambda self, **inputs: model(**inputs)})(
        **vars(engine), backward=lambda loss, scale_wrt_gas: loss.backward()
    )
    recorded, generator = RecordedPass(), torch.Generator().manual_seed(3)
    for i, shape in enumerate(SHAPES):
        ids = torch.randint(0, 320, shape, generator=generator)
        batch, divisor = Batch(ids, ids.masked_fill(ids > 250, -100)), torch.tensor(10.0 + i)
        want = forward_backward(engine, batch, divisor)
        gradients = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        torch.testing.assert_close(recorded(engine, batch, divisor), want)
        torch.testing.assert_close([p.grad for p in model.parameters()], gradients)
        model.zero_grad(set_to_none=True)
    runs = recording.WARM_UP + 1
    assert passes == [(4, 16)] * runs + [(4, 32)] * runs + [(2, 32)] * 2 + [(4, 16)] * runs


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_with_graphs_is_the_run_without(tmp_path: Path, precision: str):
    """Two stages of a curriculum, evaluations between, statistics observed at step 9."""
    register()
    losses = []
    for graph in (False, True):
        more = [
            *("experiment=state_tracking/s3_cpu", "launch.device=cuda", f"trainer.precision={precision}"),
            *("task.curriculum=[[8,10]]", "task.test_sequences=64", "trainer.max_steps=24"),
            *("trainer.eval_every=7", "trainer.log_every=1", "trainer.stats_every=9", "logger=none"),
            *(f"run.dir={tmp_path / str(graph)}", f"trainer.cuda_graph={graph}"),
        ]
        launch(to_config(compose("train", more)))
        records = read_metrics(tmp_path / str(graph) / "metrics.jsonl")
        losses.append([(r["loss"], r["grad_norm"]) for r in records if "loss" in r])
    assert len(losses[0]) == 24 and losses[0] == losses[1]
