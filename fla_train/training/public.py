"""What an export tells of its training config: what was computed, but not where on this machine."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from omegaconf import OmegaConf

from fla_train.hub.paths import own_name, public_name
from fla_train.training.config import TrainConfig

OF_THE_MACHINE = ("launch", "logger", "run")  # sections that do not bear on the weights


def public_config(config: TrainConfig) -> str:
    """`config` as YAML for a card that anybody may read: of local paths the last part only.

    Left out are the addresses, projects and folders in the sections `OF_THE_MACHINE`, `data.cache_dir` and
    `trainer.suite_options`.
    """
    content = asdict(config)
    for section in OF_THE_MACHINE:
        del content[section]
    content["data"]["cache_dir"] = None
    content["trainer"]["suite_options"] = []
    for source in (content["data"], *content["data"]["mixture"].values()):
        if source["source"] == "local" and source["path"]:  # perhaps a glob, or gone by now
            source["path"] = own_name(source["path"])
    return OmegaConf.to_yaml(OmegaConf.create(_mapped(public_name, content)))


def _mapped(change: Callable[[str], str], node: Any) -> Any:
    """`node` with each text in it changed."""
    if isinstance(node, dict):
        return {key: _mapped(change, value) for key, value in node.items()}
    if isinstance(node, list):
        return [_mapped(change, value) for value in node]
    return change(node) if isinstance(node, str) else node
