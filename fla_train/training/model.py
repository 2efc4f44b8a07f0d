"""The model of a run: built with fresh weights or those of `init_from`, and exported to `hf/`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from transformers import PreTrainedConfig, PreTrainedModel

from fla_train.data.cache import PreparedData
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import same_tokenizer
from fla_train.hub.card import CardInfo, recorded_config
from fla_train.hub.checksums import find_export_damage
from fla_train.hub.export import export_model
from fla_train.hub.load import load_weights, read_config, read_training_record, resolve_checkpoint
from fla_train.hub.paths import own_name, public_name
from fla_train.hub.saved_config import flat, map_text
from fla_train.models.activation_checkpointing import checkpoint_activations
from fla_train.models.build import TOKEN_IDS, build_model_config, is_zoo, model_node
from fla_train.models.build import build_model as build_fresh_model
from fla_train.models.configuration import INITIALIZATION_KEYS, MACHINE_KEYS
from fla_train.training.checkpoint import TrainState
from fla_train.training.config import TrainConfig
from fla_train.training.cuda_graph import records_graph
from fla_train.training.log import RunLogger
from fla_train.training.metrics import last_value, plot_losses
from fla_train.training.run_folder import RunFolder
from fla_train.utils.environment import git_commit
from fla_train.utils.filesystem import reason
from fla_train.utils.hub_names import is_hub_name
from fla_train.utils.records import read_metrics

# A run may differ from `init_from` in these: they change neither the weights nor, up to rounding, results.
FREE_FIELDS = (
    *MACHINE_KEYS,
    *INITIALIZATION_KEYS,
    "hidden_ratio",
    "max_position_embeddings",
    "initializer_range",
    "use_cache",
    "residual_in_fp32",
)
BATCH_KEYS = {  # of `trainer`, taken from `init_from`
    "seq_len": (int,),
    "micro_batch_size": (int,),
    "target_batch_tokens": (int,),
    "activation_checkpointing": (bool, str),
}
PRIVATE_SECTIONS = ("hub", "launch", "logger", "run")  # of the config: they do not bear on the weights


def build_model(config: TrainConfig, data: PreparedData, *, fresh: bool = False) -> PreTrainedModel:
    """The model with the tokenizer's special ids, in fp32; fresh weights depend on `seed` only.

    Args:
        fresh: leave the weights of `init_from` to `load_initial_weights` or to a checkpoint.

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
    documents = config.task is None and config.data.document_boundaries
    if documents and config.model.get("source") == "hf" and not model.keeps_documents_apart():
        raise ValueError(
            f"{type(model).__name__} does not keep packed documents apart: set data.document_boundaries=false"
        )
    return model


def load_initial_weights(config: TrainConfig, model: PreTrainedModel) -> None:
    """Give `model` the weights of `init_from`, if there is one.

    Raises:
        ValueError: they are missing or damaged.
    """
    if config.init_from is None:
        return
    weights = load_weights(
        config.init_from,
        dtype=model.dtype,
        mixer=getattr(model.config, "mixer", None),
        translate=not is_zoo(config.model),
    )
    model.load_state_dict(weights.state_dict())


def architecture(source: str) -> dict[str, Any]:
    """The `model` section of a run that starts from `source`.

    Raises:
        ValueError: `source` names no model of this package.
    """
    return model_node(_read_model_config(source))


def tokenizer_source(source: str) -> str | None:
    """What `data.tokenizer.name` is for a run that starts from `source`; None: it has no tokenizer."""
    found = resolve_checkpoint(source)
    if isinstance(found, Path) and not any(found.glob("tokenizer*")):  # of a synthetic task
        return None
    return str(found)


def batch_sizes(source: str) -> dict[str, Any]:
    """The `trainer` keys of the batch that `source` was trained with, as far as it records them."""
    try:
        record = recorded_config(read_training_record(resolve_checkpoint(source)))
        trainer = record["trainer"] | {"target_batch_tokens": record["trainer"]["global_batch_tokens"]}
    except (KeyError, TypeError):  # another program's export
        return {}
    return {key: trainer[key] for key, kinds in BATCH_KEYS.items() if type(trainer.get(key)) in kinds}


def check_initial_weights(config: TrainConfig) -> None:
    """Compare architecture and tokenizer of `init_from` with those of the run.

    Raises:
        ValueError: naming what differs, and how to take it from `init_from`.
    """
    source = config.init_from
    there = _read_model_config(source, translate=not is_zoo(config.model))
    node = config.model | {"vocab_size": config.model["vocab_size"] or there.vocab_size}
    ours, theirs = (dict(flat(model_node(settings))) for settings in (build_model_config(node), there))
    differing = [
        f"model.{name}={ours.get(name)} (there {theirs.get(name)})"
        for name in sorted({*ours, *theirs})
        if name.removeprefix("config.") not in FREE_FIELDS + TOKEN_IDS and ours.get(name) != theirs.get(name)
    ]
    if differing:
        raise ValueError(
            f"init_from={source} has another architecture: {', '.join(differing)}; without these overrides "
            "the run takes its model from there"
        )
    if config.task is not None:
        return
    tokenizer = tokenizer_source(source)
    if tokenizer is None:
        raise ValueError(f"init_from={source} has no tokenizer, so it can't train on text: choose task=")
    if not same_tokenizer(config.data.tokenizer, TokenizerConfig(name=tokenizer)):
        raise ValueError(
            f"init_from={source} was trained with another tokenizer than data.tokenizer.name="
            f"{config.data.tokenizer.name}: set data.tokenizer.name={tokenizer}"
        )


def _read_model_config(source: str, *, translate: bool | None = None) -> PreTrainedConfig:
    found = resolve_checkpoint(source)
    try:
        return read_config(found, translate=translate)
    except (OSError, ValueError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise ValueError(f"init_from={source} can't be read: {cause}") from error


class Exporter:
    """Exports the model of a run to `hf/`. All ranks call `export`, rank 0 writes."""

    def __init__(self, config: TrainConfig, data: PreparedData, folder: RunFolder, engine, logger: RunLogger):
        self._config, self._data, self._folder = config, data, folder
        self._engine, self._logger = engine, logger
        self.error: str | None = None  # why the newest export is missing, on rank 0

    def export(self, state: TrainState, *, last: bool = False) -> Path | None:
        """Draw the plots and export this step's model.

        Args:
            last: the run's last: one that is there already and intact stays.

        Returns:
            Its folder; on rank 0 None if it could not be written, which the others do not know. Only
            programming errors are raised: training does not end because of a copy of the model.
        """
        path, self.error = self._folder.export(state.step), None
        if dist.get_rank() == 0:  # other machines may see a shared folder late
            try:
                plots = self._draw()
                if not (last and self._is_intact(path)):
                    self._write(state, path, plots)
            except (AssertionError, AttributeError, LookupError, NameError, TypeError):
                raise
            except Exception as error:
                self.error = reason(error)
                self._logger.log(f"step {state.step:,}: NO EXPORT, {self.error}")
        dist.barrier()
        return path if self.error is None else None

    def _draw(self) -> list[Path]:
        """The plots so far."""
        plots = [self._folder.accuracy_plot] if self._folder.accuracy_plot.is_file() else []
        if last_value(self._folder.metrics, "loss") is not None:
            plots.append(plot_losses([self._folder.root], self._folder.loss_plot))
        return plots

    def _is_intact(self, export: Path) -> bool:
        """Whether there is an export with every file as it was written; a damaged one is named."""
        if not export.is_dir():
            return False
        damage = find_export_damage(export)
        if damage is not None:
            self._logger.log(f"export {export} is written again: {damage}")
        return damage is None

    def _write(self, state: TrainState, path: Path, plots: list[Path]) -> None:
        card = model_card(self._config, self._data, self._folder, state)
        export_model(self._engine.module, self._data.tokenizer(), path, card, plots=plots)
        self._logger.log(f"step {state.step:,}: exported {path}")


def model_card(config: TrainConfig, data: PreparedData, folder: RunFolder, state: TrainState) -> CardInfo:
    """The card of an export, without anything about this machine: exports are published."""
    losses = {
        "train": last_value(folder.metrics, "loss"),
        "validation": last_value(folder.metrics, "validation_loss"),
    }
    tokenizer, source = data.manifest["tokenizer"]["name"], data.manifest["source"]
    parts = [config.data, *config.data.mixture.values()] if config.task is None else []
    return CardInfo(
        name=folder.name,
        data=" ".join(filter(None, (source.get("path"), source.get("name")))) or source["kind"],
        datasets=[part.path for part in parts if part.source == "hub" and is_hub_name(part.path)],
        tokenizer=tokenizer and public_name(tokenizer),  # models of tasks have none
        init_from=config.init_from and public_name(config.init_from),
        step=state.step,
        tokens=state.tokens,
        seq_len=config.trainer.seq_len,
        losses={name: loss for name, loss in losses.items() if loss is not None},
        metrics=_last_results(folder.metrics),
        recipe=_recipe(config),
        config=public_config(config),
        commit=git_commit(),
    )


def _last_results(metrics: Path) -> dict[str, float]:
    """What the last validation found besides its loss, by name; without results by length of the context."""
    last = next((r for r in reversed(read_metrics(metrics)) if "validation_loss" in r), {})
    names = [n for n in last if n not in ("step", "tokens", "validation_loss") and "loss_at/" not in n]
    return {name.replace("_", " "): last[name] for name in names if last[name] is not None}


def _recipe(config: TrainConfig) -> str:
    trainer, optimizer, schedule = config.trainer, config.optimizer, config.schedule
    return (
        f"{optimizer.name}, peak learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}, "
        f"{schedule.name} schedule of {trainer.max_steps:,} steps, {schedule.warmup(trainer.max_steps):,} "
        f"of warm-up, {trainer.global_batch_tokens:,} tokens a step, {trainer.precision}"
    )


def public_config(config: TrainConfig) -> str:
    """`config` as YAML for a card that anybody may read: of local paths the last part only.

    Left out are the addresses, projects and folders in PRIVATE_SECTIONS, `data.cache_dir` and
    `trainer.suite_options`.
    """
    content = asdict(config)
    for section in PRIVATE_SECTIONS:
        del content[section]
    content["data"]["cache_dir"] = None
    content["trainer"]["suite_options"] = []
    for source in (content["data"], *content["data"]["mixture"].values()):
        if source["source"] == "local" and source["path"]:  # perhaps a glob, or gone by now
            source["path"] = own_name(source["path"])
    return OmegaConf.to_yaml(OmegaConf.create(map_text(public_name, content)))
