"""The typed config of `fla-train`: what `configs/train.yaml` may hold, and with which types.

Values, units and defaults stand with a comment in the YAML files; the dataclasses give Hydra the types, so an
unknown key or a wrong type fails before anything starts.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fla_train.data.config import DataConfig
from fla_train.hub.saved_config import escaped, read_saved
from fla_train.models.configuration import model_schema
from fla_train.models.zoo.build import BaselineConfig
from fla_train.tasks.config import TaskConfig


@dataclass
class OptimizerConfig:
    name: str = MISSING
    lr: float = MISSING
    weight_decay: float = MISSING
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    max_grad_norm: float = MISSING
    momentum: float | None = None


@dataclass
class ScheduleConfig:
    name: str = MISSING
    warmup_steps: int | None = None
    start_ratio: float = 0.0
    decay_steps: int | None = None
    min_ratio: float = MISSING


@dataclass
class TrainerConfig:
    max_steps: int = MISSING
    seq_len: int = MISSING
    global_batch_tokens: int | str = MISSING
    micro_batch_size: int = MISSING
    precision: str = MISSING
    activation_checkpointing: bool = MISSING
    log_every: int = MISSING
    eval_every: int = MISSING
    eval_tokens: int = MISSING
    checkpoint_every: int = MISSING
    keep_checkpoints: int = MISSING
    export_every: int = MISSING
    resume: str = MISSING
    max_skipped_steps: int = MISSING
    check_backend: bool = MISSING
    # With values, so that the config.yaml of a run begun before they were keys can be read.
    target_batch_tokens: int = 16384
    keep_every: int = 0
    spike_deviations: float = 0.0
    stats_every: int = 0
    profile_steps: list[int] = field(default_factory=list)
    suite_every: int = 0
    suite: str = "perplexity"
    suite_options: list[str] = field(default_factory=list)
    eval_buckets: int = 1
    hang_timeout: float = 0.0
    cuda_graph: bool = False


@dataclass
class LaunchConfig:
    device: str = MISSING
    num_processes: int | str = MISSING
    num_machines: int = MISSING
    machine_rank: int | None = None
    main_process_ip: str = MISSING
    main_process_port: int | None = None
    max_restarts: int = 0
    peak_tflops: float | None = None
    rendezvous_timeout: float = 600.0
    overlap_communication: bool = False


@dataclass
class WandbConfig:
    mode: str = MISSING
    project: str = MISSING
    name: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LoggerConfig:
    wandb: WandbConfig = field(default_factory=WandbConfig)
    tensorboard: bool = MISSING


@dataclass
class RunConfig:
    dir: str | None = None
    job: int | None = None


@dataclass
class TrainConfig:
    """Root of `train.yaml`. `model` holds the fields of `DeltaProductConfig`, typed by `model_schema`."""

    model: Any = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig | None = None
    baseline: BaselineConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    init_from: str | None = None
    seed: int = MISSING
    dry_run: bool = MISSING


def register(root: type[TrainConfig] = TrainConfig) -> None:
    """Put the schemas that `train.yaml` merges in Hydra's ConfigStore; `root` may add keys."""
    store = ConfigStore.instance()
    store.store(name="train_schema", node=root)
    store.store(name="model_schema", node=model_schema(), package="model")


def to_config(node: DictConfig | dict) -> TrainConfig:
    """A composed node, or the plain content of a `config.yaml`, as dataclasses; `model` becomes a plain dict.

    Raises:
        ValueError: a mandatory value is missing.
    """
    if isinstance(node, DictConfig):
        if missing := OmegaConf.missing_keys(node):
            raise ValueError(f"these keys need a value: {', '.join(sorted(missing))}")
        node = escaped(OmegaConf.to_container(node, resolve=True))  # what is resolved is plain text now
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), node))


def to_yaml(config: TrainConfig) -> str:
    """The content of `config.yaml`; `load_config` is the inverse."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_config(path: Path) -> TrainConfig:
    """Read a run's `config.yaml`. What looks like an interpolation in it is text: the run may be another's.

    Raises:
        ValueError: it is unreadable, or another version wrote it with other keys.
    """
    try:
        return to_config(read_saved(path))
    except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as failure:
        raise ValueError(
            f"{path} is no config of this version: {' '.join(str(failure).split())}"
        ) from failure
