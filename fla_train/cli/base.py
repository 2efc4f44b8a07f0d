"""Base config of a command: that of the run in `run.dir`, or the model that `init_from` names.

It is one more entry of the defaults list in configs/train.yaml. Groups that the command or its experiment
choose replace the base's sections; single overrides change single keys. Code that the base names (mixer,
task, optimizer, schedule, callbacks) must be named by the command or its configs too: a folder does not
choose what is imported. Nor does it choose machines, or what is published or evaluated: the rule
`from_folder` names such keys, which come from the command alone.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from fla_train.cli.app import compose
from fla_train.cli.overrides import GROUPS, repository
from fla_train.hub.saved_config import escaped, kept_tokenizer
from fla_train.training.config import TrainConfig, load_config, named_classes
from fla_train.training.log import log
from fla_train.utils.keys import rule
from fla_train.utils.overrides import assign, parse_all, pop_leaves

START_KEYS = {"experiment", "debug", "model", "task", "data", "init_from"}  # begin a new run


def with_base(overrides: Sequence[str], *, sweep: bool = False, config_dir: str | None = None) -> list[str]:
    """Prepend the base-config override, if there is a base.

    Args:
        sweep: jobs share the model of `init_from`; a run's config is never their base.
        config_dir: folder of further options (`--config-dir`).

    Raises:
        ValueError: the run's config is unreadable, or `init_from` names no model.
    """
    parsed = parse_all(overrides)
    by_key = {o.key_or_group: None if o.is_sweep_override() else o.value() for o in parsed}
    left_out: dict[str, Any] = {}
    run, weights = None if sweep else by_key.get("run.dir"), by_key.get("init_from")
    chosen = _chosen_groups(by_key, config_dir)
    if run and (file := Path(str(run)).expanduser() / "config.yaml").is_file():
        saved = _of_run(file)
        base = {section: values for section, values in saved.items() if section not in chosen}
        left_out = pop_leaves(base, _is_left_to_the_command)
        if "data" in chosen and saved["init_from"]:  # the run keeps the tokenizer of its weights
            tokenizer = saved["data"]["tokenizer"]
            base["data"] = {"tokenizer": {name: tokenizer[name] for name in ("name", "eos_token")}}
    elif weights:
        base = _of_weights(str(weights), with_model="model" not in chosen)
    else:
        return list(overrides)
    classes = {key: value for key, value in named_classes(base).items() if key not in by_key}
    if missing := _unnamed_classes(classes, parsed, config_dir):
        reason = f"{run or weights} names code, and a folder does not choose imports"
        raise ValueError(f"{reason}: add {shlex.join(missing)}")
    ConfigStore.instance().store(group="base", name="saved", node=escaped(base), package="_global_")
    # The base's model is merged into the option of `model`, whose keys must be those of its kind.
    kind = ["model=hf/any"] if "source" in base.get("model", {}) else []
    overrides = [*kind, "base=saved", *overrides]
    if left_out:
        config = compose("train", overrides, config_dir=config_dir)
        changed = [item for item in left_out.items() if OmegaConf.select(config, item[0]) != item[1]]
        if options := [assign(key, value) for key, value in changed if key not in by_key]:
            reason = f"{run} does not decide what is published, or which machines train"
            log(f"{reason}; to keep: {shlex.join(options)}", error=True)
    return overrides


def _unnamed_classes(
    classes: dict[str, str], overrides: Sequence[Override], config_dir: str | None
) -> list[str]:
    """Return as overrides the classes of a base that the command, with its config files, does not name."""
    if not classes:
        return []
    sections = tuple(key.partition(".")[0] + "." for key in classes)  # their keys may be the base's only
    kept = (o for o in overrides if not (o.is_sweep_override() or o.key_or_group.startswith(sections)))
    composed = compose("train", [o.input_line for o in kept], config_dir=config_dir)
    named = named_classes(OmegaConf.to_container(composed))
    return [assign(key, value) for key, value in classes.items() if named.get(key) != value]


def _is_left_to_the_command(key: str, value: Any) -> bool:
    """Return whether only the command may set a key to this value."""
    allowed = rule(TrainConfig, "from_folder", key)
    return allowed is not None and value not in allowed


def check_run_or_start(overrides: Sequence[str]) -> None:
    """Reject a `run.dir` without a run if nothing says what to train: it may be misspelt.

    Raises:
        ValueError: the folder holds no run, and no override begins a new one.
    """
    parsed = parse_all(overrides)
    keys = {o.key_or_group.split(".")[0] for o in parsed}
    run = next((o.value() for o in parsed if o.key_or_group == "run.dir"), None)
    if run and not keys & START_KEYS and not (Path(str(run)).expanduser() / "config.yaml").is_file():
        raise ValueError(f"run.dir={run} holds no run: name experiment=, model= or data= for a new one")


def _of_run(file: Path) -> dict[str, Any]:
    """Return the config of a run without its folder and `trainer.resume=none`."""
    base = asdict(load_config(file))
    del base["run"]
    tokenizer = base["data"]["tokenizer"]
    tokenizer["name"] = kept_tokenizer(tokenizer["name"], file.parent)
    if base["trainer"]["resume"] == "none":
        del base["trainer"]["resume"]
    return base


def _of_weights(source: str, with_model: bool) -> dict[str, Any]:
    """Return the tokenizer of an export, its model and its training batch.

    If the command chooses a model, model and batch are omitted; training compares the models.
    """
    from fla_train.run.init_from import architecture, batch_sizes, tokenizer_source

    base = {"model": architecture(source), "trainer": batch_sizes(source)} if with_model else {}
    if (name := tokenizer_source(source)) is not None:
        base["data"] = {"tokenizer": {"name": name, "eos_token": None}}
    return base


def _chosen_groups(by_key: dict[str, Any], config_dir: str | None) -> set[str]:
    """Return the groups for which the command names an option, directly or through a recipe."""
    repo = repository(config_dir)
    chosen = {key for key in by_key if repo.group_exists(key)}
    files = [f"{group}/{by_key[group]}" for group in GROUPS if by_key.get(group)]
    while files:
        config = repo.load_config(files.pop())
        for entry in config.defaults_list if config is not None else ():
            if isinstance(entry, GroupDefault) and entry.override:
                chosen.add(entry.group.lstrip("/"))
            elif isinstance(entry, ConfigDefault) and entry.path != "_self_":
                files.append(entry.path.lstrip("/"))
    return chosen
