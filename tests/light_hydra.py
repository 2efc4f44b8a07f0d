"""Speed up `hydra.compose`, which spends most of its time on what the result does not depend on."""

import functools
from collections.abc import Sequence
from copy import copy, deepcopy
from dataclasses import replace
from typing import Any

import hydra
from hydra._internal import defaults_list
from hydra._internal.sources_registry import SourcesRegistry
from hydra.conf import JobConf, OverridesConf, RuntimeConf
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Metadata

# What composing itself reads and writes, with the groups that configs/cli.yaml overrides.
NODE = {"defaults": ["_self_", {"hydra_logging": "none"}, {"job_logging": "none"}], "searchpath": []}
NODE |= {"overrides": OverridesConf, "runtime": RuntimeConf, "job": JobConf}


def speed_up() -> None:
    """Compose with a small config of Hydra's, unless an override sets one of its keys.

    It builds that config each time and drops it from the result. Files of packages, which do not change, are
    read once, and Hydra prepares for interpolated defaults only where there are any.
    """
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

    Plugins.instance()  # It registers the sources.
    packages = SourcesRegistry.instance().resolve("pkg")
    load, choices = packages.load_config, defaults_list._create_interpolation_map

    @functools.cache
    def load_once(path: str, provider: str, name: str) -> ConfigResult:
        return load(packages(provider, f"pkg://{path}"), name)

    def load_config(source: ConfigSource, config_path: str) -> ConfigResult:
        return deepcopy(load_once(source.path, source.provider, config_path))

    def choices_if_needed(overrides: object, defaults: list, self_added: bool) -> DictConfig | None:
        needed = any(default.is_interpolation() for default in defaults)
        return choices(overrides, defaults, self_added) if needed else None

    packages.load_config = load_config
    defaults_list._create_interpolation_map = choices_if_needed
    ConfigStore.__deepcopy__ = lambda store, memo: store
    Metadata.__deepcopy__ = _copy_metadata


def _copy_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    new = copy(metadata)
    new.flags, new.resolver_cache = copy(metadata.flags), deepcopy(metadata.resolver_cache, memo)
    return new
