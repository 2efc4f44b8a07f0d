"""Define the typed config of `fla-train`: the keys of `configs/train.yaml` and their checks.

The comments in the YAML files state units and defaults. To add a key, add one field, whose `key(...)` names
its limits, and one line of YAML. The dataclasses give Hydra the types, so an unknown key or a wrong type
fails before anything starts. `find_errors` in `utils/keys.py` reports all other errors together.

The sections `data`, `task` and `hub` are defined where they are used. A feature declares its keys in its own
file, and `trainer` or `launch` inherits them. Keys of features whose files import torch are here, because
`--help` imports this module, which imports neither torch nor transformers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.data.config import DataConfig
from fla_train.hub.saved_config import escaped, read_saved
from fla_train.models.settings import MACHINE_KEYS
from fla_train.tasks.config import TaskConfig
from fla_train.training.callback import make_callbacks
from fla_train.training.features.context_parallel import ContextParallelKeys
from fla_train.training.features.cuda_graph import CudaGraphKeys
from fla_train.training.features.exports import ExportKeys
from fla_train.training.features.profile import ProfileKeys
from fla_train.training.features.pushes import HubConfig
from fla_train.training.features.suites import SuiteKeys
from fla_train.utils.import_class import import_object
from fla_train.utils.keys import key, rule
from fla_train.utils.overrides import flatten

# Fraction of the run for warm-up, and its maximum in steps.
WARMUP_SHARE, WARMUP_CAP = 0.05, 512
# Node of a model of another library, and the keys that a recipe for our family may set although that ignores
# them.
ZOO_NODE = {"source": MISSING, "model_type": MISSING, "config": {}, "vocab_size": None}
ZOO_KEYS = tuple(f"model.{name}" for name in (*ZOO_NODE, "hidden_size", "num_hidden_layers", "head_dim"))
# Keys of `trainer` for the length of a run. Exactly one of them is set.
LENGTHS = ("max_steps", "max_tokens", "epochs")
DECAY_SHARE = 0.2  # fraction of the run in which `wsd` decays


def _class_errors(name: str, options: Any) -> Iterator[str]:
    """Check that a custom class can be imported, and that options come with a class."""
    if ":" in name:
        try:
            import_object(name)
        except ValueError as error:
            yield f"name={error}"
    elif options:
        yield f"options={options} has no effect with {name}: leave it out, or name a class of yours"


@dataclass
class OptimizerConfig:
    name: str = key(choices=("adamw", "muon"), classes=True, resume="fixed")
    lr: float = key(at_least=0)
    weight_decay: float = key(at_least=0)
    beta1: float = key(at_least=0, below=1)
    beta2: float = key(at_least=0, below=1)
    eps: float = key(above=0)  # with 0, a weight without a gradient would become 0 / 0
    max_grad_norm: float = key(at_least=0)
    momentum: float | None = key(None, at_least=0, below=1)
    options: Any = key(None, type=dict | None)

    def check(self) -> Iterator[str]:
        yield from _class_errors(self.name, self.options)
        if (self.name == "muon") != (self.momentum is not None):
            yield f"momentum={self.momentum} must be a number in [0, 1) for optimizer=muon, else null"


@dataclass
class ScheduleConfig:
    name: str = key(choices=("cosine", "linear", "wsd", "constant"), classes=True)
    warmup_steps: int | None = key(None, at_least=0)
    start_ratio: float = key(0.0, at_least=0, at_most=1)
    decay_steps: int | None = key(None, at_least=0)
    min_ratio: float = key(at_least=0, at_most=1)
    options: Any = key(None, type=dict | None)

    def warmup(self, max_steps: int) -> int:
        """Return the steps of linear warm-up: `warmup_steps`; if null, 5% of the run, at most 512."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(WARMUP_CAP, int(WARMUP_SHARE * max_steps))

    def decay(self, max_steps: int) -> int:
        """Return the steps in which the learning rate decays: all steps after the warm-up, except with `wsd`.

        `wsd` (warm-up, stable, decay) decays for the last `decay_steps`, or 20% of the run if it is null.
        """
        after_warmup = max_steps - self.warmup(max_steps)
        if self.name != "wsd":
            return after_warmup
        wanted = int(DECAY_SHARE * max_steps) if self.decay_steps is None else self.decay_steps
        return min(after_warmup, wanted)

    def check(self) -> Iterator[str]:
        yield from _class_errors(self.name, self.options)
        if ":" in self.name:  # a custom schedule reads only its options
            return
        if self.name == "constant" and self.min_ratio != 1:
            yield f"min_ratio={self.min_ratio} has no effect with schedule=constant: leave it at 1"
        if self.decay_steps is not None and self.name != "wsd":
            yield f"decay_steps={self.decay_steps} is for schedule=wsd only: leave it at null"


@dataclass
class LoopKeys:
    max_steps: int | None = key(at_least=1)
    # A single token has no target.
    seq_len: int = key(at_least=2, resume="fixed", from_task=True, from_weights=True)
    global_batch_tokens: int | str = key(at_least=1, resume="fixed", from_task=True)
    micro_batch_size: int = key(at_least=1, from_weights=True)
    precision: str = key(choices=("auto", "bf16", "fp8", "fp32"))
    activation_checkpointing: bool | str = key(choices=(True, False, "selective"), from_weights=True)
    log_every: int = key(at_least=1)
    eval_every: int = key(at_least=0)
    eval_tokens: int = key(at_least=1)
    checkpoint_every: int = key(at_least=0)
    keep_checkpoints: int = key(at_least=0)
    resume: str = key(resume="free")
    max_skipped_steps: int = key(at_least=1)
    check_backend: bool = MISSING
    target_batch_tokens: int = key(16384, at_least=1, resume="free", from_weights=True)
    keep_every: int = key(0, at_least=0)
    spike_deviations: float = key(0.0, at_least=0)
    stats_every: int = key(0, at_least=0)
    eval_buckets: int = key(1, at_least=1)
    hang_timeout: float = key(0.0, at_least=0)
    gradient_reduction: str = key("fp32", choices=("fp32", "bf16"))
    initial_state: str = key("zero", choices=("zero", "passing", "noise"))
    zero_state_share: float = key(0.1, at_least=0, at_most=1)
    state_noise: float | str = key("fitted", above=0, word="fitted")
    callbacks: list[Any] = key(factory=list, classes=True)
    max_tokens: int | None = key(None, at_least=1)
    epochs: float | None = key(None, above=0)

    @property
    def autocasts(self) -> bool:
        """Return whether matrix products run in bf16, except those in float8."""
        return self.precision in ("bf16", "fp8")

    def check(self) -> Iterator[str]:
        if self.keep_every and not self.keep_checkpoints:
            yield "keep_every has no effect with trainer.keep_checkpoints=0, which keeps all"
        lengths = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(lengths) != 1:
            yield f"{', '.join(LENGTHS)}: set exactly one of them, not {', '.join(lengths) or 'none'}"
        try:
            make_callbacks(self.callbacks)
        except ValueError as error:
            yield f"callbacks: {error}"


@dataclass
class TrainerConfig(SuiteKeys, ExportKeys, ProfileKeys, CudaGraphKeys, LoopKeys):
    """Hold the section `trainer`: the keys of the loop, then those of its features."""


@dataclass
class LaunchConfig(ContextParallelKeys):
    device: str = key(choices=("auto", "cuda", "cpu"))
    num_processes: int | str = key(at_least=1)
    num_machines: int = key(at_least=1, from_folder=())
    machine_rank: int | None = key(None, from_folder=())
    main_process_ip: str = key(from_folder=())
    main_process_port: int = key(29500, above=0, below=65536, from_folder=())
    max_restarts: int = key(0, at_least=0)
    peak_tflops: float | None = key(None, above=0)
    rendezvous_timeout: float = key(600.0, above=0, at_most=1e9)  # torch's store counts ns in 64 bits

    @property
    def data_parallel(self) -> int:
        """Return the number of processes, or of context-parallel groups, that read different sequences."""
        return max(1, self.num_processes // self.context_parallel)

    def describe(self) -> str:
        """Describe the processes that read different sequences."""
        if self.context_parallel == 1:
            return f"{self.num_processes} process(es)"
        return f"{self.data_parallel} group(s) of {self.context_parallel} processes"


@dataclass
class WandbConfig:
    mode: str = key(choices=("offline", "online", "disabled"), from_folder=("offline", "disabled"))
    project: str = MISSING
    name: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LoggerConfig:
    wandb: WandbConfig = key(factory=WandbConfig, from_folder=())
    tensorboard: bool = MISSING


@dataclass
class RunConfig:
    dir: str | None = None
    job: int | None = None


@dataclass
class TrainConfig:
    """Hold the root of `train.yaml`. `model` is the node of any model, see `fla_train.models.build`."""

    model: Any = key(
        resume="fixed",
        keys={
            "resume": dict.fromkeys(MACHINE_KEYS, "free"),
            "from_task": {"vocab_size": True},
            "classes": {"mixer": True},
        },
    )
    data: DataConfig = key(factory=DataConfig, resume="data")
    task: TaskConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = key(factory=LaunchConfig, resume="free", private=True)
    logger: LoggerConfig = key(factory=LoggerConfig, resume="free", private=True)
    hub: HubConfig = key(factory=HubConfig, resume="free", from_folder=(), private=True)
    run: RunConfig = key(factory=RunConfig, resume="free", private=True)
    init_from: str | None = key(None, resume="fixed")
    seed: int = key(at_least=0, resume="fixed")
    dry_run: bool = key(resume="free", from_folder=())

    @property
    def batch_unit(self) -> int:
        """Return the tokens of one micro-batch over all ranks, for a resolved config.

        The ranks of a context-parallel group split the tokens of a micro-batch.
        """
        return self.trainer.seq_len * self.trainer.micro_batch_size * self.launch.data_parallel

    @property
    def num_accumulated(self) -> int:
        """Return the number of micro-batches per rank and step, for a resolved config."""
        return self.trainer.global_batch_tokens // self.batch_unit

    @property
    def initial_states(self) -> str:
        """Return the source of initial states: zero, passing, noise, or contiguous (the preceding text)."""
        return "contiguous" if self.task is None and self.data.contiguous else self.trainer.initial_state

    @property
    def packs_documents(self) -> bool:
        """Return whether the documents of a row are kept apart."""
        return self.task is None and self.data.document_boundaries

    def check(self) -> Iterator[str]:
        if self.logger.tensorboard and find_spec("tensorboard") is None:
            yield "logger.tensorboard=true needs a package: pip install tensorboard"
        if self.run.dir == "":  # an unset variable as in `run.dir=$RUN`: such a run could not resume
            yield "run.dir is empty: give a folder, or null for a new one in runs/"
        if self.launch.num_machines > 1 and self.run.dir is None and not self.dry_run:
            yield "launch.num_machines > 1 needs run.dir: one folder, on a file system all machines share"


SCHEMA = OmegaConf.structured(TrainConfig)


def register(root: type[TrainConfig] = TrainConfig) -> None:
    """Register the schemas that `train.yaml` merges in Hydra's ConfigStore. `root` may add keys.

    Experiments also have the key `scales`, which `fla_train.cli.scales` applies and `to_config` drops.
    """
    OmegaConf.register_new_resolver("product", lambda *numbers: int(math.prod(numbers)), replace=True)
    OmegaConf.register_new_resolver("sqrt", math.sqrt, replace=True)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=make_dataclass("Request", [("scales", Any, None)], bases=(root,)))
    zoo = OmegaConf.create(ZOO_NODE)
    # Allow `model.config.FIELD=...` for fields that the YAML does not name.
    OmegaConf.set_struct(zoo.config, False)
    store.store(name="zoo_schema", node=zoo)


def to_config(node: DictConfig | dict, overrides: Sequence[str] = ()) -> TrainConfig:
    """Convert a composed node, or the plain content of a `config.yaml`, to dataclasses.

    `model` becomes a plain dict.

    Args:
        overrides: the user's overrides, with which `node` was composed.

    Raises:
        ValueError: a mandatory value is missing, or an override sets a field that the model does not have.
    """
    if isinstance(node, DictConfig):
        if missing := OmegaConf.missing_keys(node):
            raise ValueError(f"these keys need a value: {', '.join(sorted(missing))}")
        # Resolved values are plain text from here on.
        node = escaped(OmegaConf.to_container(node, resolve=True))
    node = {key: value for key, value in node.items() if key != "scales"}
    keys = [text.split("=", 1)[0].lstrip("+~") for text in overrides]
    lengths = [name for name in LENGTHS if f"trainer.{name}" in keys]
    if len(lengths) == 1:  # it replaces the length of the recipe
        node["trainer"] = {**node["trainer"], **dict.fromkeys(set(LENGTHS) - set(lengths))}
    decided = [text for text, key in zip(overrides, keys, strict=True) if rule(TrainConfig, "from_task", key)]
    if node.get("task") and decided:
        raise ValueError(f"the task decides {', '.join(decided)}: see task.batch_size, .options and .train")
    # A recipe for our family has set fields that other models do not have.
    if "source" in node.get("model", {}):
        if ignored := [key for key in keys if key.startswith("model.") and not key.startswith(ZOO_KEYS)]:
            raise ValueError(f"this model has no {', '.join(ignored)}: write model.config.FIELD=...")
        node["model"] = {key: node["model"][key] for key in ZOO_NODE}
    return OmegaConf.to_object(OmegaConf.merge(SCHEMA, node))


def to_yaml(config: TrainConfig) -> str:
    """Return the content of `config.yaml`; `load_config` is the inverse."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def load_config(path: Path) -> TrainConfig:
    """Read a run's `config.yaml`. Interpolations in it stay text, because the file may come from a stranger.

    Raises:
        ValueError: the file is unreadable, or has keys of another version.
    """
    try:
        return to_config(read_saved(path))
    except (OSError, AttributeError, KeyError, TypeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not a config of this version: {' '.join(str(error).split())}") from error


def named_classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a training config, as plain data, that name classes outside this package."""
    classes = ((key, value) for key, value in flatten(config) if rule(TrainConfig, "classes", key))
    return {key: value for key, value in classes if ":" in str(value)}
