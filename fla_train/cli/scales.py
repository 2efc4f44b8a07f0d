"""Group `scale`: the sections `scales` of an experiment, applied as options.

    scales:
      fast:              # scale=fast merges this section into the experiment
        trainer:
          max_steps: 2000
      cpu:
        from: fast       # merge another section first

Experiments that build on others (`common`) inherit their sections key by key.
Overrides of the command line win.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from fla_train.utils.overrides import parse_all

SCALES = ("paper", "fast", "cpu", "long", "long_fast")

# Choosing a scale removes the sections from the config. The option `sections` keeps them for
# `store_sections`, which makes the options of the group `scales` out of them.
for _name in SCALES:
    ConfigStore.instance().store(group="scale", name=_name, node={"scales": None}, package="_global_")
ConfigStore.instance().store(group="scale", name="sections", node={}, package="_global_")


def store_sections(overrides: Sequence[str], compose: Callable[[list[str]], DictConfig]) -> None:
    """Put the sections of the experiments that `overrides` choose into Hydra's ConfigStore.

    Args:
        compose: composes a config with overrides.

    Raises:
        ValueError: an experiment does not have the scale that is chosen for it.
    """
    texts = [text for text in overrides if text.lstrip("+").startswith(("scale=", "experiment="))]
    chosen = {o.key_or_group: o.value() for o in parse_all(texts)}
    scale, experiment = chosen.get("scale"), chosen.get("experiment")
    if scale not in SCALES or scale == "paper":  # Hydra reports other names
        return
    if experiment is None:
        raise ValueError("a scale changes an experiment: add experiment=NAME")
    try:
        sections = compose([f"experiment={experiment}", "scale=sections"]).scales or {}
    except HydraException:  # composing all overrides reports the error
        return
    if scale not in sections:
        known = ", ".join(name for name in SCALES if name == "paper" or name in sections)
        raise ValueError(f"experiment={experiment} has the scales {known}")
    ConfigStore.instance().store(
        group=f"scales/{experiment}", name=scale, node=_section(sections, scale), package="_global_"
    )


def _section(sections: DictConfig, name: str) -> dict[str, Any]:
    section = OmegaConf.to_container(sections[name])  # without resolving ${task.batch_size}
    base = section.pop("from", None)
    return OmegaConf.to_container(OmegaConf.merge(_section(sections, base) if base else {}, section))
