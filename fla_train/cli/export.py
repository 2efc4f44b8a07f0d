"""`fla-export`: copy a run's exported model, also in another format, or push it to the Hugging Face Hub.

fla-export checkpoint=runs/my-run output=my-model
fla-export checkpoint=runs/my-run format=fla output=my-model
fla-export checkpoint=runs/my-run hub.repo_id=user/my-model hub.private=false
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fla_train.cli.app import HydraJob, fail, run_hydra
from fla_train.eval.config import DTYPES
from fla_train.hub.paths import last_component
from fla_train.utils.hub_names import HubRepository
from fla_train.utils.keys import key, require_valid


@dataclass
class PushConfig(HubRepository):
    """Add the branch and the tag of a push."""

    revision: str | None = None
    tag: str | None = None


@dataclass
class ExportConfig:
    """Schema of configs/export.yaml."""

    checkpoint: str | None = key(None, required="a run folder or an exported folder")
    output: str | None = None
    format: str | None = None
    dtype: str = key("auto", choices=DTYPES)
    mixer: str | None = None
    hub: PushConfig = field(default_factory=PushConfig)

    def check(self) -> Iterator[str]:
        if not (self.output or self.hub.repo_id):
            yield "nothing to do: give output=DIR, hub.repo_id=user/model, or both"


def register() -> None:
    ConfigStore.instance().store(name="export_schema", node=ExportConfig)


def task(job: HydraJob) -> int:
    # These import the models, which --help does not need.
    from fla_train.hub.checkpoint_config import resolve_checkpoint
    from fla_train.hub.convert import convert_export, stored_format
    from fla_train.hub.export import copy_export
    from fla_train.hub.push import push
    from fla_train.utils.device import pick_dtype

    settings: ExportConfig = OmegaConf.to_object(job.config)
    require_valid(settings)
    folder = resolve_checkpoint(settings.checkpoint)
    origin, dtype = folder, pick_dtype(settings.dtype)
    with ExitStack() as stack:
        if dtype is not None or (settings.format and settings.format != stored_format(folder)):
            scratch = stack.enter_context(TemporaryDirectory(prefix="fla-export-"))
            target = settings.output or Path(scratch, last_component(folder))
            folder = convert_export(folder, target, settings.format, dtype=dtype, mixer=settings.mixer)
        elif not isinstance(folder, Path):
            raise ValueError(f"{folder} is on the Hub already: give a run folder or an exported folder")
        elif settings.output:
            copy_export(folder, settings.output)
        if settings.output:
            print(f"exported to {settings.output}")
        if settings.hub.repo_id:
            try:
                print(f"pushed {origin} to {push(folder, **asdict(settings.hub), origin=origin)}")
            except ConnectionError as failure:
                return fail(failure, code=1)
    return 0


def main() -> None:
    run_hydra("export", register, task)


if __name__ == "__main__":
    main()
