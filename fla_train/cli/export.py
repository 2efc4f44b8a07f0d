"""`fla-export`: copy a run's exported model, also in another format, or push it to the Hugging Face Hub.

fla-export checkpoint=runs/my-run output=my-model
fla-export checkpoint=runs/my-run format=fla output=my-model
fla-export checkpoint=runs/my-run hub.repo_id=user/my-model hub.private=false
"""

from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.app import fail, run_hydra


@dataclass
class HubConfig:
    """Where on the Hub."""

    repo_id: str | None = None
    private: bool = True
    revision: str | None = None


@dataclass
class ExportConfig:
    """Schema of configs/export.yaml."""

    checkpoint: str | None = None
    output: str | None = None
    format: str | None = None
    hub: HubConfig = field(default_factory=HubConfig)


def register() -> None:
    ConfigStore.instance().store(name="export_schema", node=ExportConfig)


def task(config: DictConfig) -> int:
    from fla_train.hub import copy_export, push, resolve_checkpoint  # heavy, and not needed for --help
    from fla_train.hub.convert import convert_export, stored_format
    from fla_train.hub.push import check_repo_id

    settings: ExportConfig = OmegaConf.to_object(config)
    if not settings.checkpoint:
        raise ValueError("give checkpoint=RUN: a run folder or an exported folder")
    if not (settings.output or settings.hub.repo_id):
        raise ValueError("nothing to do: give output=DIR, hub.repo_id=user/model, or both")
    if settings.hub.repo_id:
        check_repo_id(settings.hub.repo_id)
    folder = resolve_checkpoint(settings.checkpoint)
    if settings.format and settings.format != stored_format(folder):
        if not settings.output:
            raise ValueError(f"format={settings.format} writes another folder: give output=DIR, too")
        folder = convert_export(folder, settings.output, settings.format)
        print(f"exported to {folder}")
    elif not isinstance(folder, Path):
        raise ValueError(f"{folder} is on the Hub already: give a run folder or an exported folder")
    elif settings.output:
        folder = copy_export(folder, settings.output)
        print(f"exported to {folder}")
    if settings.hub.repo_id:
        try:
            address = push(
                folder, settings.hub.repo_id, private=settings.hub.private, revision=settings.hub.revision
            )
        except ConnectionError as failure:
            return fail(failure, code=1)
        print(f"pushed {folder} to {address}")
    return 0


def main() -> None:
    run_hydra("export", register, task)


if __name__ == "__main__":
    main()
