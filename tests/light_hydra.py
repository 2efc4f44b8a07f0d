"""Speed up `hydra.compose`, which builds Hydra's own config each time and drops it from the result."""

from collections.abc import Sequence
from dataclasses import replace

import hydra
from hydra.conf import JobConf, OverridesConf, RuntimeConf
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

# What composing itself reads and writes, with the groups that configs/cli.yaml overrides.
NODE = {"defaults": ["_self_", {"hydra_logging": "none"}, {"job_logging": "none"}], "searchpath": []}
NODE |= {"overrides": OverridesConf, "runtime": RuntimeConf, "job": JobConf}


def speed_up() -> None:
    """Compose with a small config of Hydra's, unless an override sets one of its keys."""
    compose, node = hydra.compose, OmegaConf.create(NODE)

    def light(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
        stored = ConfigStore.instance().repo["hydra"]
        whole = stored["config.yaml"]
        keys = {text.lstrip("+~").partition("=")[0] for text in overrides}
        if not any(key.startswith("hydra") and key != "hydra.searchpath" for key in keys):
            stored["config.yaml"] = replace(whole, node=node)
        try:
            return compose(config_name, overrides=list(overrides))
        finally:
            stored["config.yaml"] = whole

    hydra.compose = light
