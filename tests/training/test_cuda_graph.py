"""The recorded pass against the engine's own: the same losses and weights, whatever the shapes on the way."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import cuda_graph_steps
import engine_steps
import numpy as np
import pytest
import torch
import triton
from torch import Tensor, nn
from torch.nn.functional import dropout

from fla_train.cli.app import compose
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.build import TOKEN_IDS
from fla_train.training.config import TrainConfig, register, to_config, to_yaml
from fla_train.training.features.cuda_graph import records_graph
from fla_train.training.model import build_model
from fla_train.training.recorded_pass import RecordedPass
from tests.ranks import start_ranks


@pytest.mark.parametrize("mode", ["false", "true", "selective"])
def test_steps_by_it_are_those_of_the_engine(make_config, warm_ranks, mode):
    """Rehearsed on a CPU: a recording for each run of batches of one shape, whatever is between."""
    more = [
        "trainer.precision=fp32",
        "trainer.micro_batch_size=8",
        f"trainer.activation_checkpointing={mode}",
    ]
    config = make_config("launch.device=cpu", *more)
    assert warm_ranks.run(1, cuda_graph_steps.rehearse, config) == [[3, 3]]


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_(en|dis)able")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_recomputed_layers_must_not_draw_random_numbers(make_config: Callable[..., TrainConfig], device: str):
    cuda_graph = cuda_graph_steps.Rehearsal if device == "cpu" else RecordedPass
    model = engine_steps.make_model(make_config()).train().to(device)
    ids, labels = engine_steps.make_batch(0)
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(7.0)}
    inputs = {name: value.to(device) for name, value in inputs.items()}
    checkpoint_activations(model, True, preserve_rng_state=False)
    assert cuda_graph(model, bf16=False).run(inputs).isfinite()
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, y: dropout(y, 0.5))
    with pytest.raises(ValueError, match="cuda_graph=false"):
        cuda_graph(model, bf16=False).run(inputs)
    model.gradient_checkpointing_disable()
    if device == "cuda":  # on a CPU these are numbers of the host
        assert cuda_graph(model, bf16=False).run(inputs).isfinite()


@pytest.mark.parametrize(
    ("device", "asked", "records"), [("cuda", "true", True), ("cuda", "false", False), ("cpu", "true", False)]
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_only_runs_on_a_gpu_that_ask_for_it_record(make_config, device, asked, records):
    """Their recomputed layers leave the random number generator alone: no graph can read its state."""
    more = ["trainer.activation_checkpointing=selective", f"launch.device={device}"]
    config = make_config("trainer.micro_batch_size=8", f"trainer.cuda_graph={asked}", *more)
    assert records_graph(config) == records
    fixed = {"tokenizer": dict.fromkeys(TOKEN_IDS, 0)}
    model = build_model(config, SimpleNamespace(manifest=fixed))
    ids, labels = engine_steps.make_batch(0)
    with patch.object(torch, "get_rng_state", wraps=torch.get_rng_state) as read:
        model.train()(input_ids=ids, labels=labels, use_cache=False).loss.backward()
    assert read.called != records


TRANSFORMERS = ["mamba_signed/tiny", *(f"hf/{name}/tiny" for name in ("llama", "mamba2", "xlstm"))]
FLA = [f"fla/{name}/tiny" for name in ("gla", "retnet", "rwkv7")]


@pytest.mark.parametrize(
    ("name", "device", "bf16"),
    [("mamba_signed/tiny", "cpu", False)]
    + [
        pytest.param(name, "cuda", bf16, marks=marks)
        for names, marks in ((TRANSFORMERS, [pytest.mark.gpu]), (FLA, [pytest.mark.gpu, pytest.mark.long]))
        for name in names
        for bf16 in (False, True)
    ],
)
def test_models_of_other_libraries_can_be_recorded(overrides: list[str], name: str, device: str, bf16: bool):
    """With the loss of training. That nothing in them waits for the device only a GPU can show."""
    if name in FLA:
        pytest.importorskip("fla")
    if "retnet" in name and bf16 and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("without a graph, too: an illegal memory access in its backward pass (Triton 3.6)")
    model = _model(overrides, name, "model.num_hidden_layers=2").to(device)  # RWKV-7 needs two
    cuda_graph = cuda_graph_steps.Rehearsal if device == "cpu" else RecordedPass
    _compare(model, cuda_graph(model, bf16=bf16), device, bf16)


class OwnBackward(torch.autograd.Function):
    """Twice `y`, by a backward pass within the backward pass, as in a reversible layer."""

    @staticmethod
    def forward(ctx: SimpleNamespace, y: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return 2 * y

    @staticmethod
    def backward(ctx: SimpleNamespace, grad: Tensor) -> tuple[Tensor, None]:
        with torch.enable_grad():
            (ctx.weight * grad.sum().detach()).sum().backward()
        return 2 * grad, None


@pytest.mark.parametrize(
    "change",
    [
        lambda module, y: y if torch.rand((), device="cpu") < 2 else 0 * y,
        lambda module, y: y if random.random() < 2 else 0 * y,
        lambda module, y: y if np.random.rand() < 2 else 0 * y,
        lambda module, y: OwnBackward.apply(y, module.weight),
    ],
    ids=["torch", "python", "numpy", "backward"],
)
def test_what_a_recording_would_not_repeat_is_an_error(make_config, change):
    model = engine_steps.make_model(make_config()).train()
    cuda_graph = cuda_graph_steps.Rehearsal(model, bf16=False)
    ids, labels = engine_steps.make_batch(0)
    inputs = {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(7.0)}
    assert cuda_graph.run(inputs).isfinite()
    model.model.embeddings.register_forward_hook(lambda module, inputs, y: change(module, y))
    shorter = inputs | {"input_ids": ids[:, :16], "labels": labels[:, :16]}  # is recorded again
    with pytest.raises(ValueError, match="cuda_graph=false"):
        cuda_graph.run(shorter)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "change",
    [lambda y: y * (y.sum().isfinite().item() + 1), lambda y: y + torch.zeros(1).to(y.device)],
    ids=["reads a value", "copies from the host"],
)
def test_a_pass_that_waits_for_the_gpu_is_an_error(overrides, change, where):
    model = _model(overrides, "mamba_signed/tiny").cuda()

    def hook(module: nn.Module, inputs: object, y: Tensor) -> Tensor | None:
        if where == "forward":
            return change(y)
        y.register_hook(change)
        return None

    model.get_input_embeddings().register_forward_hook(hook)
    cuda_graph = RecordedPass(model, bf16=False)
    ids = torch.randint(17, (3, 64), device="cuda")
    with pytest.raises(ValueError, match="cuda_graph=false"):
        cuda_graph.run({"input_ids": ids, "labels": ids})
    assert torch.cuda.get_sync_debug_mode() == 0


def _model(overrides: list[str], name: str, *more: str) -> nn.Module:
    register()
    general = [text for text in overrides if not text.startswith("model.")]
    config = to_config(compose("train", [*general, f"model={name}", "model.vocab_size=17", *more]))
    return build_model(config, SimpleNamespace(manifest={"tokenizer": dict.fromkeys(TOKEN_IDS, 0)})).train()


def _compare(model: nn.Module, recorded: RecordedPass, device: str, bf16: bool) -> None:
    """Two batches' losses and gradients by `recorded` and by the model itself."""
    for _ in range(2):
        ids = torch.randint(17, (3, 64), device=device)
        inputs = {"input_ids": ids, "labels": ids, "num_items_in_batch": torch.tensor(7.0, device=device)}
        loss = recorded.run(inputs).clone()
        found = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            expected = model(**inputs, use_cache=False).loss
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        for gradient, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["false", "true", "selective"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_replayed_steps_are_those_of_the_engine(make_config, tmp_path, precision, mode):
    more = [f"trainer.activation_checkpointing={mode}"]
    more += ["launch.device=cuda", "launch.num_processes=1", "trainer.micro_batch_size=8"]
    if precision == "fp8":
        more.append("model.hidden_size=128")  # narrow layers stay bf16
    config = make_config(f"trainer.precision={precision}", *more)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    script = Path(__file__).with_name("cuda_graph_steps.py")
    (rank,) = start_ranks([str(script), str(tmp_path / "config.yaml")], 1)
    output, errors = rank.communicate(timeout=300)
    assert rank.returncode == 0 and "equal" in output, errors[-3000:]
