"""Build the model of a run, with fresh weights or those of `init_from`, and write its model card."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from transformers import PreTrainedModel

from fla_train.data.cache import PreparedData
from fla_train.hub.card import CardInfo
from fla_train.hub.load import load_causal_lm
from fla_train.hub.paths import last_component, public_name
from fla_train.hub.saved_config import map_text
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.build import TOKEN_IDS, build_model_config, is_zoo
from fla_train.models.build import build_model as build_fresh_model
from fla_train.training.checkpoint import TrainState
from fla_train.training.features.cuda_graph import records_graph
from fla_train.training.metrics import last_value, newest_validation
from fla_train.training.run_folder import RunFolder
from fla_train.utils.environment import git_commit
from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.keys import rule
from fla_train.utils.overrides import pop_leaves
from fla_train.utils.safe_files import read_json

if TYPE_CHECKING:
    from fla_train.training.config import TrainConfig


def build_model(config: "TrainConfig", data: PreparedData, *, fresh: bool = False) -> PreTrainedModel:
    """Build the model in fp32 with the tokenizer's special ids; fresh weights depend on `seed` only.

    Args:
        fresh: do not load the weights of `init_from`; a checkpoint or `load_initial_weights` will.

    Raises:
        ValueError: the weights of `init_from` are missing or damaged, or the class has no gradient
            checkpointing or does not keep packed documents apart.
    """
    torch.manual_seed(config.seed)
    settings = build_model_config(config.model)
    for key in TOKEN_IDS:
        if getattr(settings, key) is None:
            setattr(settings, key, data.manifest["tokenizer"][key])
    model = build_fresh_model(settings)
    if not fresh:
        load_initial_weights(config, model)
    mode, preserve = config.trainer.activation_checkpointing, not records_graph(config)
    checkpoint_activations(model, mode, preserve_rng_state=preserve)
    if config.packs_documents and config.model.get("source") == "hf" and not model.keeps_documents_apart():
        raise ValueError(f"{type(model).__name__} mixes documents: set data.document_boundaries=false")
    return model


def load_initial_weights(config: "TrainConfig", model: PreTrainedModel) -> None:
    """Load the weights of `init_from`, if the config names a source.

    Raises:
        ValueError: they are missing or damaged.
    """
    if config.init_from is None:
        return
    options = {"mixer": getattr(model.config, "mixer", None), "translate": not is_zoo(config.model)}
    weights = load_causal_lm(config.init_from, dtype=model.dtype, **options)
    model.load_state_dict(weights.state_dict())


@contextmanager
@torch.no_grad()
def other_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the values of the parameters in `weights` inside the `with` block."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in weights}
    saved = {name: parameter.clone() for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.copy_(saved[name])


def model_card(config: "TrainConfig", data: PreparedData, folder: RunFolder, state: TrainState) -> CardInfo:
    """Return the card of an export. Exports are published, so it has no path, user or host name."""
    newest = newest_validation(folder.metrics)
    losses = {"train": last_value(folder.metrics, "loss"), "validation": newest.get("validation_loss")}
    # The card shows neither losses by context length nor values that are not finite.
    hidden = ("step", "tokens", "validation_loss")
    metrics = {
        name.replace("_", " "): value
        for name, value in newest.items()
        if value is not None and name not in hidden and "loss_at/" not in name
    }
    streamed = config.data.stream and config.task is None
    in_epoch = None if streamed else data.manifest["splits"]["train"].get("tokens")  # inf: a task without end
    device = read_json(folder.environment).get("hardware") if folder.environment.is_file() else None
    processes = dist.get_world_size() if dist.is_initialized() else 1
    tokenizer, source = data.manifest["tokenizer"]["name"], data.manifest["source"]
    kind = last_component(config.data.path) if source["kind"] == "local" else source["kind"]
    sources = [config.data, *config.data.mixture.values()] if config.task is None else []
    return CardInfo(
        name=folder.name,
        data=" ".join(filter(None, (source.get("path"), source.get("name")))) or kind,
        datasets=[s.path for s in sources if s.source == "hub" and is_hub_name(s.path)],
        tokenizer=tokenizer and public_name(tokenizer),  # models of tasks have no tokenizer
        init_from=config.init_from and public_name(config.init_from),
        step=state.step,
        tokens=state.tokens,
        epochs=state.tokens / in_epoch if in_epoch and math.isfinite(in_epoch) else None,
        seq_len=config.trainer.seq_len,
        losses={name: loss for name, loss in losses.items() if loss is not None},
        metrics=metrics,
        recipe=_recipe(config),
        config=public_config(config),
        commit=git_commit(),
        hardware=device and f"{processes} x {device}",
        date=datetime.now(UTC).date().isoformat(),
    )


def _recipe(config: "TrainConfig") -> str:
    trainer, optimizer, schedule = config.trainer, config.optimizer, config.schedule
    return (
        f"{optimizer.name}, peak learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, "
        f"{schedule.name} schedule of {trainer.max_steps:,} steps, {schedule.warmup(trainer.max_steps):,} "
        f"of warm-up, {trainer.global_batch_tokens:,} tokens a step, {trainer.precision}"
    )


def public_config(config: "TrainConfig") -> str:
    """Return `config` as YAML for a public card, with local paths cut to their last component.

    Private keys (addresses, projects, folders) and the options of callbacks are left out.
    """
    content = asdict(config)
    pop_leaves(content, lambda key, _: rule(type(config), "private", key))
    content["trainer"]["callbacks"] = [
        entry["class"] if isinstance(entry, dict) else entry for entry in content["trainer"]["callbacks"]
    ]
    for source in (content["data"], *content["data"]["mixture"].values()):
        # The path may be a glob, or no longer exist.
        if source["source"] == "local" and source["path"]:
            source["path"] = last_component(source["path"])
    return OmegaConf.to_yaml(OmegaConf.create(map_text(public_name, content)))
