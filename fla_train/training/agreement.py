"""Check that all machines train the same: each composes its own config and prepares its own data."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from fla_train.data.cache import PreparedData
from fla_train.training.config import TrainConfig
from fla_train.training.run_folder import RunFolder

SECTIONS = ("seed", "model", "task", "baseline", "optimizer", "schedule", "trainer", "init_from")


def run_facts(
    config: TrainConfig, data: PreparedData, resume: Path | None, folder: RunFolder
) -> dict[str, str | None]:
    """What must be equal on all ranks, each fact under the name a message gives it."""
    content = asdict(config)
    facts: dict[str, str | None] = {key: json.dumps(content[key], sort_keys=True) for key in SECTIONS}
    facts["the prepared data"] = data.folder.name
    facts["the Hub's commit of the data"] = json.dumps(data.commits(), sort_keys=True)
    facts["data.document_boundaries"] = str(config.data.document_boundaries)
    facts["the checkpoint to resume"] = resume.name if resume else None
    # The first machine has written it by now. Another content, or none, means another folder.
    shared = folder.environment
    facts["run.dir (is it one shared folder?)"] = shared.read_text() if shared.is_file() else None
    return facts


def check_config_consistency(facts: Mapping[str, str | None]) -> None:
    """Compare this rank's facts with all others'. Every rank calls it.

    Raises:
        ValueError: on all ranks, naming what differs.
    """
    everyone: list[Mapping[str, str | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(facts))
    if differing := differences(everyone):
        raise ValueError(f"the machines differ in {', '.join(differing)}: give the same command on each")


def differences(everyone: Sequence[Mapping[str, str | None]]) -> list[str]:
    """Names of the facts that are not the same for all ranks."""
    return [name for name, value in everyone[0].items() if any(facts[name] != value for facts in everyone)]
