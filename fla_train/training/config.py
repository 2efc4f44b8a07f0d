"""The typed config of `fla-train`: the keys of `configs/train.yaml`, their checks, and what "auto" means.

Units and defaults stand with a comment in the YAML files. A new key is one field here, whose `key(...)` names
its limits, and one line of YAML. The dataclasses give Hydra the types, so an unknown key or a wrong type
fails before anything starts. `validate` reports all other errors together.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fla_train.data.config import DataConfig, absolute, with_absolute_paths
from fla_train.data.tokenizers import TokenizerNotCached, tokenizer_size
from fla_train.hub.pushes import HubConfig
from fla_train.hub.saved_config import escaped, read_saved
from fla_train.models.activation_checkpointing import SELECTIVE
from fla_train.models.build import NODE_KEYS, build_model_config, build_on_meta, is_zoo
from fla_train.models.configuration import MACHINE_KEYS, DeltaProductConfig, model_schema
from fla_train.tasks import TaskConfig, training_task
from fla_train.training.callback import Callback, make_callbacks
from fla_train.training.log import log
from fla_train.utils.import_class import import_object
from fla_train.utils.keys import AUTO, find_errors, key, require_valid
from fla_train.utils.ranks import is_rank

FLOAT8_CAPABILITY = (8, 9)  # of a GPU
WARMUP_SHARE, WARMUP_CAP = 0.05, 512  # of the run, and never more than the papers' steps
# Keys of `model` that a recipe for our family may set though the model of another library does not read them
ZOO_KEYS = tuple(f"model.{name}" for name in (*NODE_KEYS, "hidden_size", "num_hidden_layers", "head_dim"))
OF_THE_TASK = ("trainer.seq_len=", "trainer.global_batch_tokens=", "model.vocab_size=")  # overrides
DECAY_SHARE = 0.2  # of the run, for `wsd`
VOCABULARY_MULTIPLE = 64  # matmuls with the head are slow at odd sizes


def _class_errors(name: str, options: Any) -> Iterator[str]:
    """Check that a custom class can be imported, and that options are a mapping and come with one."""
    if not isinstance(options, dict | None):
        yield f"options={options} must be null or a mapping"
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
    eps: float = key(above=0)  # a weight without a gradient would become 0 / 0
    max_grad_norm: float = key(at_least=0)
    momentum: float | None = key(None, at_least=0, below=1)
    options: Any = None

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
    options: Any = None

    def check(self) -> Iterator[str]:
        yield from _class_errors(self.name, self.options)

    def warmup(self, max_steps: int) -> int:
        """Steps of linear warm-up: the configured number, or 5% of the run (at most 512) when it is null."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return min(WARMUP_CAP, int(WARMUP_SHARE * max_steps))

    def decay(self, max_steps: int) -> int:
        """Steps in which the rate falls: all after the warm-up, but for `wsd` the last ones only.

        `wsd` (warm-up, stable, decay) takes the configured number, or 20% of the run when it is null.
        """
        after_warmup = max_steps - self.warmup(max_steps)
        if self.name != "wsd":
            return after_warmup
        wanted = int(DECAY_SHARE * max_steps) if self.decay_steps is None else self.decay_steps
        return min(after_warmup, wanted)

    def errors(self, max_steps: int) -> Iterator[str]:
        if ":" in self.name:  # a custom schedule reads only its options
            return
        warmup = self.warmup(max_steps)
        if self.name == "constant" and self.min_ratio != 1:
            yield f"schedule.min_ratio={self.min_ratio} has no effect with schedule=constant: leave it at 1"
        if warmup > max_steps:
            yield (
                f"schedule.warmup_steps={warmup} is longer than the run: use at most "
                f"trainer.max_steps={max_steps}"
            )
        elif self.decay_steps is not None and self.decay_steps > max_steps - warmup:
            left = max_steps - warmup
            yield f"schedule.decay_steps={self.decay_steps} must lie in 0..{left}, which the warm-up leaves"
        if self.decay_steps is not None and self.name != "wsd":
            yield f"schedule.decay_steps={self.decay_steps} is for schedule=wsd only: leave it at null"


@dataclass
class TrainerConfig:
    max_steps: int = key(at_least=1)
    seq_len: int = key(at_least=2, resume="fixed")  # one token leaves none to predict
    global_batch_tokens: int | str = key(at_least=1, resume="fixed")
    micro_batch_size: int = key(at_least=1)
    precision: str = key(choices=("auto", "bf16", "fp8", "fp32"))
    activation_checkpointing: bool | str = key(choices=(True, False, SELECTIVE))
    log_every: int = key(at_least=1)
    eval_every: int = key(at_least=0)
    eval_tokens: int = key(at_least=1)
    checkpoint_every: int = key(at_least=0)
    keep_checkpoints: int = key(at_least=0)
    export_every: int = key(at_least=0)
    resume: str = key(resume="free")
    max_skipped_steps: int = key(at_least=1)
    check_backend: bool = MISSING
    target_batch_tokens: int = key(16384, at_least=1, resume="free")
    keep_every: int = key(0, at_least=0)
    spike_deviations: float = key(0.0, at_least=0)
    stats_every: int = key(0, at_least=0)
    profile_steps: list[int] = field(default_factory=list)
    suite_every: int = key(0, at_least=0)
    suite: str = "perplexity"
    suite_options: list[str] = field(default_factory=list)
    eval_buckets: int = key(1, at_least=1)
    hang_timeout: float = key(0.0, at_least=0)
    cuda_graph: bool = False
    gradient_reduction: str = key("fp32", choices=("fp32", "bf16"))
    initial_state: str = key("zero", choices=("zero", "passing", "noise"))
    zero_state_share: float = key(0.1, at_least=0, at_most=1)
    state_noise: float | str = "fitted"
    callbacks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = self.activation_checkpointing
        if isinstance(given, str):  # quoted, or of an environment variable
            self.activation_checkpointing = {"true": True, "false": False}.get(given.lower(), given)

    @property
    def autocasts(self) -> bool:
        """Whether matrix products run in bf16 but for those in float8."""
        return self.precision in ("bf16", "fp8")

    def check(self) -> Iterator[str]:
        if self.keep_every and not self.keep_checkpoints:
            yield "keep_every has no effect with trainer.keep_checkpoints=0, which keeps all"
        if outside := [step for step in self.profile_steps if not 1 <= step <= self.max_steps]:
            yield f"profile_steps={outside} must lie in 1..{self.max_steps}, the steps of the run"
        try:
            make_callbacks(self.callbacks)
        except ValueError as error:
            yield f"callbacks: {error}"
        noise = self.state_noise
        if noise != "fitted" and (isinstance(noise, str) or noise <= 0):
            yield f"state_noise={noise} must be fitted, or a standard deviation above 0"
        if self.suite_every:
            folder = files("fla_train.configs") / "suite"
            suites = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
            if self.suite not in suites:
                yield f"suite={self.suite} must be one of {', '.join(suites)}"


@dataclass
class LaunchConfig:
    device: str = key(choices=("auto", "cuda", "cpu"))
    num_processes: int | str = key(at_least=1)
    num_machines: int = key(at_least=1)
    machine_rank: int | None = None
    main_process_ip: str = MISSING
    main_process_port: int | None = key(None, above=0, below=65536)
    max_restarts: int = key(0, at_least=0)
    peak_tflops: float | None = key(None, above=0)
    rendezvous_timeout: float = key(600.0, above=0, at_most=1e9)  # torch's store counts ns in 64 bits
    overlap_communication: bool = False
    context_parallel: int = key(1, at_least=1)

    @property
    def data_parallel(self) -> int:
        """Number of processes, or groups of context parallel ones, that read different sequences."""
        return max(1, self.num_processes // self.context_parallel)

    def errors(self) -> Iterator[str]:
        if self.num_processes % self.num_machines:
            yield (
                f"launch.num_processes={self.num_processes} (all machines together) is not a multiple of "
                f"launch.num_machines={self.num_machines}"
            )
        if self.num_processes % self.context_parallel:
            yield (
                f"launch.context_parallel={self.context_parallel} does not divide launch.num_processes="
                f"{self.num_processes}: use a divisor"
            )
        if self.machine_rank is not None and not 0 <= self.machine_rank < self.num_machines:
            yield (
                f"launch.machine_rank={self.machine_rank} must lie in 0..{self.num_machines - 1} "
                f"(launch.num_machines={self.num_machines})"
            )


@dataclass
class WandbConfig:
    mode: str = key(choices=("offline", "online", "disabled"))
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
    """Root of `train.yaml`. `model` is the node of any model, see `fla_train.models.build`."""

    model: Any = key(resume="fixed", rules=dict.fromkeys(MACHINE_KEYS, "free"))
    data: DataConfig = key(factory=DataConfig, resume="data")
    task: TaskConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = key(factory=LaunchConfig, resume="free")
    logger: LoggerConfig = key(factory=LoggerConfig, resume="free")
    hub: HubConfig = field(default_factory=HubConfig)
    run: RunConfig = key(factory=RunConfig, resume="free")
    init_from: str | None = key(None, resume="fixed")
    seed: int = key(at_least=0, resume="fixed")
    dry_run: bool = key(resume="free")

    @property
    def num_accumulated(self) -> int:
        """Micro-batches per rank and step, of a resolved config. Context parallel ranks share theirs."""
        rows = self.trainer.micro_batch_size * self.launch.data_parallel
        return self.trainer.global_batch_tokens // (self.trainer.seq_len * rows)

    @property
    def initial_states(self) -> str:
        """What training sequences start from: zero, passing, noise, or contiguous (the text before)."""
        return "contiguous" if self.task is None and self.data.contiguous else self.trainer.initial_state

    def check(self) -> Iterator[str]:
        yield from _model_errors(self)
        yield from _resume_errors(self)
        yield from _package_errors(self)
        if self.run.dir == "":  # `run.dir=$RUN` without RUN: a run that could never be resumed
            yield "run.dir is empty: give a folder, or null for a new one in runs/"
        if self.launch.num_machines > 1 and self.run.dir is None and not self.dry_run:
            yield "launch.num_machines > 1 needs run.dir: one folder, on a file system all machines share"


def validate(config: TrainConfig) -> None:
    """Check every value against its limits, the others and this machine.

    Raises:
        ValueError: one line per error, each naming the key and a value that would do.
    """
    require_valid(config)
    config = with_batch(with_processes(config))
    errors = [
        *config.launch.errors(),
        *config.schedule.errors(config.trainer.max_steps),
        *([] if config.dry_run else _device_errors(config)),  # a dry run may plan for other machines
        *find_conflicts(config),
        *(
            f"{callback.name}: {line}"
            for callback in make_callbacks(config.trainer.callbacks)
            for line in callback.check(config)
        ),
        *_state_errors(config),
        *_context_errors(config),
        *_float8_errors(config),
        *(_batch_errors(config) if config.task is None else _task_batch_errors(config)),
    ]
    if errors:
        raise ValueError("\n  ".join(errors))


# Conditions on a resolved config, by the words that name them in errors
CONDITIONS: dict[str, Callable[[TrainConfig], bool]] = {
    "a synthetic task": lambda c: c.task is not None,
    "a model of another library": lambda c: is_zoo(c.model),
    "model.mixer": lambda c: c.model.get("mixer") is not None,
    "data.contiguous=true": lambda c: c.initial_states == "contiguous",
    "data.document_boundaries=true": lambda c: c.task is None and c.data.document_boundaries,
    "launch.context_parallel above 1": lambda c: c.launch.context_parallel > 1,
    "launch.device=cpu": lambda c: resolve_device(c) == "cpu",
    "launch.num_processes above 1": lambda c: c.launch.num_processes > 1,
    "launch.overlap_communication=true": lambda c: c.launch.overlap_communication,
    "several micro-batches a step": lambda c: c.num_accumulated > 1,
    "trainer.activation_checkpointing=selective": lambda c: c.trainer.activation_checkpointing == SELECTIVE,
    "trainer.callbacks with after_loss": lambda c: any(
        type(callback).after_loss is not Callback.after_loss
        for callback in make_callbacks(c.trainer.callbacks)
    ),
    "trainer.cuda_graph=true": lambda c: c.trainer.cuda_graph,
    "trainer.initial_state other than zero": lambda c: c.trainer.initial_state != "zero",
    "trainer.precision=fp8": lambda c: c.trainer.precision == "fp8",
    "trainer.suite_every above 0": lambda c: c.trainer.suite_every > 0,
}
# Pairs of conditions that exclude each other
CONFLICTS: dict[str, tuple[str, ...]] = {
    "data.contiguous=true": ("a model of another library", "trainer.initial_state other than zero"),
    "launch.context_parallel above 1": (
        "a model of another library",
        "a synthetic task",
        "data.contiguous=true",
        "launch.overlap_communication=true",
        "model.mixer",
        "trainer.activation_checkpointing=selective",
        "trainer.initial_state other than zero",
    ),
    "trainer.cuda_graph=true": (
        "data.document_boundaries=true",
        "launch.num_processes above 1",
        "several micro-batches a step",
        "trainer.callbacks with after_loss",  # replayed kernels run no Python
    ),
    "trainer.initial_state other than zero": ("a model of another library",),
    "trainer.precision=fp8": ("a model of another library", "launch.device=cpu"),
    "trainer.suite_every above 0": ("a synthetic task",),
}


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield a line for each pair of options in `CONFLICTS` that a resolved config uses."""
    for option, others in CONFLICTS.items():
        for other in others:
            if CONDITIONS[option](config) and CONDITIONS[other](config):
                yield f"{option} is not supported with {other}: change one of them"


def _resume_errors(config: TrainConfig) -> Iterator[str]:
    resume, run_dir = config.trainer.resume, config.run.dir
    if resume in ("auto", "none"):
        return
    if (Path(resume) / "checkpoints").is_dir():
        yield f"trainer.resume={resume} is a run folder: give one of the folders in its checkpoints/"
    # A run that was begun there needs it no more: it has checkpoints of its own.
    elif not Path(resume).is_dir() and not (run_dir and (Path(run_dir) / "checkpoints").is_dir()):
        yield f"trainer.resume={resume} is no checkpoint folder: use auto, none or an existing path"


def _model_errors(config: TrainConfig) -> Iterator[str]:
    try:
        settings = build_model_config(config.model)
        if isinstance(settings, DeltaProductConfig) and settings.mixer is not None:
            from fla_train.models.mixers.registry import check_mixer  # imports the models: seconds

            check_mixer(settings)
        documents = config.task is None and config.data.document_boundaries
        if documents and config.model.get("source", "fla") != "fla":  # fla's layers take the bounds
            from fla_train.models.zoo.flops import forward_flops  # imports the models: seconds

            if forward_flops(build_on_meta(config.model), config.trainer.seq_len).recurrences:
                yield (
                    f"data.document_boundaries=true is not supported with {config.model['model_type']}: its "
                    "layers carry a state across the documents of a packed row: set it to false"
                )
    except ValueError as error:
        yield str(error)


def _state_errors(config: TrainConfig) -> Iterator[str]:
    """What sequences can't start from."""
    if config.initial_states == "zero" or is_zoo(config.model):
        return
    settings = build_model_config(config.model)
    setting = "data.contiguous" if config.initial_states == "contiguous" else "trainer.initial_state"
    if "linear_attention" not in settings.layer_types:
        yield f"{setting} has no effect without linear_attention layers: leave it at its default"
    if settings.mixer is None:
        return
    from fla_train.models.mixers.delta_product import DeltaProductMixer  # seconds
    from fla_train.models.mixers.registry import linear_mixer, takes_cache

    mixer = linear_mixer(settings)
    packed = config.task is None and config.data.document_boundaries
    if not takes_cache(mixer):
        yield (
            f"{setting} is not supported with the mixer {settings.mixer}, which keeps no states: leave it at "
            "its default, or give its forward the parameter cache (docs/mixers.md)"
        )
    elif packed and not issubclass(mixer, DeltaProductMixer):  # which knows rows from documents
        yield (
            f"{setting} and data.document_boundaries are not supported together with the mixer "
            f"{settings.mixer}: set one of them to its default"
        )


def _batch_errors(config: TrainConfig) -> Iterator[str]:
    trainer, launch = config.trainer, config.launch
    unit = trainer.seq_len * trainer.micro_batch_size * launch.data_parallel
    if trainer.global_batch_tokens % unit:
        below = trainer.global_batch_tokens // unit * unit
        fits = f"{below} or {below + unit}" if below else f"{unit}"
        rows, rest = divmod(trainer.global_batch_tokens, trainer.seq_len * launch.data_parallel)
        if rows and not rest:
            size = next(part for part in range(trainer.micro_batch_size, 0, -1) if rows % part == 0)
            fits += f", or trainer.micro_batch_size={size}"
        micro_batches, rest = divmod(trainer.global_batch_tokens, trainer.seq_len * trainer.micro_batch_size)
        counts = range(launch.num_processes, 0, -1) if not rest and launch.context_parallel == 1 else ()
        divisors = (n for n in counts if micro_batches % n == 0 and n % launch.num_machines == 0)
        if micro_batches and not trainer.cuda_graph and (count := next(divisors, None)):
            fits += f", or launch.num_processes={count}"
        yield (
            f"trainer.global_batch_tokens={trainer.global_batch_tokens} is not a multiple of {unit} = "
            f"seq_len {trainer.seq_len} x micro_batch_size {trainer.micro_batch_size} x "
            f"{describe_processes(launch)}: use {fits}"
        )


def describe_processes(launch: LaunchConfig) -> str:
    """The processes that read different sequences, for a reader."""
    if launch.context_parallel == 1:
        return f"{launch.num_processes} process(es)"
    return f"{launch.data_parallel} group(s) of {launch.context_parallel} processes"


def _context_errors(config: TrainConfig) -> Iterator[str]:
    trainer, parts = config.trainer, config.launch.context_parallel
    if parts == 1 or config.task is not None or is_zoo(config.model):
        return
    if trainer.seq_len % parts:
        yield f"launch.context_parallel={parts} does not divide trainer.seq_len={trainer.seq_len}"
    elif trainer.seq_len // parts < config.model["conv_size"]:
        yield f"launch.context_parallel={parts} leaves {trainer.seq_len // parts} tokens to a rank: use fewer"


def _task_batch_errors(config: TrainConfig) -> Iterator[str]:
    task, processes = config.task, config.launch.num_processes
    unit = config.trainer.micro_batch_size * processes
    if task.batch_size % unit:
        yield f"task.batch_size={task.batch_size} is not a multiple of {unit} = micro_batch_size x processes"
    if task.test_sequences < processes:
        yield f"task.test_sequences={task.test_sequences} leaves processes without a sequence"


def _device_errors(config: TrainConfig) -> Iterator[str]:
    """What this machine lacks for its part."""
    if resolve_device(config) != "cuda":
        return
    launch = config.launch
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    needed = launch.num_processes // launch.num_machines
    if present == 0:
        yield "launch.device=cuda, but this machine has no usable GPU: use launch.device=cpu"
    elif needed > present:
        yield (
            f"launch.num_processes={launch.num_processes} asks for {needed} GPUs on this machine, which has "
            f"{present}: use launch.num_processes={present * launch.num_machines}"
        )


def _float8_errors(config: TrainConfig) -> Iterator[str]:
    if config.trainer.precision == "fp8" and resolve_device(config) == "cuda" and torch.cuda.is_available():
        if (capability := torch.cuda.get_device_capability()) < FLOAT8_CAPABILITY:
            yield (
                "trainer.precision=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this "
                "one has {}.{}: set trainer.precision=bf16".format(*capability)
            )


def _package_errors(config: TrainConfig) -> Iterator[str]:
    """Packages that training would import only once the data are prepared, and that are not installed."""
    needed = dict.fromkeys(("accelerate", "deepspeed", "matplotlib"), ("training", ""))
    if (mode := config.logger.wandb.mode) != "disabled":
        needed["wandb"] = (f"logger.wandb.mode={mode}", ", or train without it: logger=none")
    if config.logger.tensorboard:
        needed["tensorboard"] = ("logger.tensorboard=true", ", or leave that at false")
    for name, (user, otherwise) in needed.items():
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # without an origin: a bare folder, such as W&B's ./wandb
            yield f"{user} needs a package: pip install {name}{otherwise}"


def register(root: type[TrainConfig] = TrainConfig) -> None:
    """Put the schemas that `train.yaml` merges in Hydra's ConfigStore; `root` may add keys.

    Experiments also have the key `scales`, which `fla_train.cli.scales` applies and `to_config` drops.
    """
    OmegaConf.register_new_resolver("product", lambda *numbers: int(math.prod(numbers)), replace=True)
    store = ConfigStore.instance()
    request = make_dataclass("Request", [("scales", Any, None)], bases=(root,))
    store.store(name="train_schema", node=request)
    store.store(name="model_schema", node=model_schema())
    zoo = OmegaConf.create({"source": MISSING, "model_type": MISSING, "config": {}, "vocab_size": None})
    OmegaConf.set_struct(zoo.config, False)  # `model.config.FIELD=...` of fields that the YAML does not name
    store.store(name="zoo_schema", node=zoo)


def to_config(node: DictConfig | dict, overrides: Sequence[str] = ()) -> TrainConfig:
    """A composed node, or the plain content of a `config.yaml`, as dataclasses; `model` becomes a plain dict.

    Args:
        overrides: the user's, with which `node` was composed.

    Raises:
        ValueError: a mandatory value is missing, or an override is of a field that the model does not have.
    """
    if isinstance(node, DictConfig):
        if missing := OmegaConf.missing_keys(node):
            raise ValueError(f"these keys need a value: {', '.join(sorted(missing))}")
        node = escaped(OmegaConf.to_container(node, resolve=True))  # what is resolved is plain text now
    node = {key: value for key, value in node.items() if key != "scales"}
    if node.get("task") and (
        ignored := [text for text in overrides if text.lstrip("+").startswith(OF_THE_TASK)]
    ):
        raise ValueError(
            f"the task decides {', '.join(ignored)}: leave it out; task.batch_size, task.options and "
            "task.train give batch, vocabulary and length"
        )
    if is_zoo(node.get("model", {})):  # a recipe for our family has set fields that other models do not have
        keys = [text.split("=", 1)[0].lstrip("+~") for text in overrides]
        if ignored := [key for key in keys if key.startswith("model.") and not key.startswith(ZOO_KEYS)]:
            raise ValueError(
                f"a {node['model']['model_type']} model does not have {', '.join(ignored)}: write "
                "model.config.FIELD=... for the fields of its class"
            )
        node["model"] = {key: node["model"][key] for key in NODE_KEYS}
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
    except (OSError, AttributeError, KeyError, TypeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is no config of this version: {' '.join(str(error).split())}") from error


def with_run_paths(config: TrainConfig) -> TrainConfig:
    """`config` with an absolute `trainer.resume`, and `run.dir` without a leading `~`."""
    resume, run_dir = config.trainer.resume, config.run.dir
    return replace(
        config,
        trainer=replace(config.trainer, resume=resume if resume in ("auto", "none") else absolute(resume)),
        run=replace(config.run, dir=None if run_dir is None else os.path.expanduser(run_dir)),
    )


def resolve(config: TrainConfig) -> TrainConfig:
    """`config` with "auto" replaced; run.dir and vocabulary may stay null.

    Paths of data, tokenizer and weights become absolute, so that `run.dir` alone resumes from any folder.
    """
    config, device = with_processes(config), resolve_device(config)
    precision, init_from = config.trainer.precision, config.init_from
    if precision == AUTO:
        precision = "bf16" if device == "cuda" else "fp32"
    if init_from is not None and os.path.exists(os.path.expanduser(init_from)):
        init_from = absolute(init_from)
    config = replace(
        config,
        data=with_absolute_paths(config.data),
        init_from=init_from,
        launch=replace(config.launch, device=device),
        trainer=replace(config.trainer, precision=precision),
    )
    return with_batch(config)


def resolve_device(config: TrainConfig) -> str:
    """`cuda` or `cpu`."""
    if config.launch.device != AUTO:
        return config.launch.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_processes(config: TrainConfig) -> TrainConfig:
    """`config` with a number for `launch.num_processes=auto`: all GPUs of each machine, on a CPU one process.

    For a rank that a launcher has started it is the launcher's number, and that of machines, too.

    Raises:
        ValueError: another number was given than the launcher has started.
    """
    launch = config.launch
    if is_rank():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if launch.num_processes not in (AUTO, world):
            raise ValueError(
                f"launch.num_processes={launch.num_processes}, but {world} ranks were started: give the same "
                "number on all machines, or leave it out"
            )
        return replace(config, launch=replace(launch, num_processes=world, num_machines=world // local))
    if launch.num_processes != AUTO:
        return config
    gpus = torch.cuda.device_count() if resolve_device(config) == "cuda" else 0
    return replace(config, launch=replace(launch, num_processes=max(1, gpus) * max(1, launch.num_machines)))


def with_batch(config: TrainConfig) -> TrainConfig:
    """`config` with a number for `trainer.global_batch_tokens=auto`.

    It is the multiple of seq_len x micro_batch_size x processes / context_parallel nearest to
    target_batch_tokens, at least one.
    """
    trainer = config.trainer
    if trainer.global_batch_tokens != AUTO:
        return config
    unit = trainer.seq_len * trainer.micro_batch_size * config.launch.data_parallel
    tokens = max(1, round(trainer.target_batch_tokens / unit)) * unit
    return replace(config, trainer=replace(trainer, global_batch_tokens=tokens))


def accumulation_steps(config: TrainConfig) -> int:
    """Micro-batches per rank and optimizer step; context parallel ranks share theirs."""
    trainer, ranks = config.trainer, with_processes(config).launch.data_parallel
    return trainer.global_batch_tokens // (trainer.seq_len * trainer.micro_batch_size * ranks)


def records_graph(config: TrainConfig) -> bool:
    """Return whether a run records its passes as CUDA graphs."""
    return config.trainer.cuda_graph and resolve_device(config) == "cuda"


def with_warmup(config: TrainConfig) -> TrainConfig:
    """`config` with its number of warm-up steps where it is null: a share of trainer.max_steps."""
    steps = config.schedule.warmup(config.trainer.max_steps)
    return replace(config, schedule=replace(config.schedule, warmup_steps=steps))


def with_vocabulary(config: TrainConfig, *, offline: bool = False) -> TrainConfig:
    """`config` with `model.vocab_size`: if null the tokenizer's size, rounded up to a multiple of 64.

    Args:
        offline: fetch no tokenizer; one that is not on this machine leaves the model's usual size.

    Raises:
        ValueError: the tokenizer has more tokens than a given `model.vocab_size`, or can't be loaded.
    """
    if config.task is not None:  # `with_task_sizes` has set it
        return config
    given = config.model["vocab_size"]
    try:
        needed = tokenizer_size(config.data.tokenizer, offline=offline)
    except TokenizerNotCached:
        needed = given or DeltaProductConfig.vocab_size
        name = config.data.tokenizer.name
        log(f"vocabulary   tokenizer {name} is not on this machine: sizes are for {needed:,} tokens")
        return with_model(config, vocab_size=needed)
    fitting = -(-needed // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if given is not None and given < needed:
        raise ValueError(
            f"model.vocab_size={given} is too small for the tokenizer's {needed} tokens: leave it out or set "
            f"model.vocab_size={fitting}"
        )
    return with_model(config, vocab_size=given or fitting)


def with_task_sizes(config: TrainConfig) -> TrainConfig:
    """`config` with the sizes that its task decides: vocabulary, sequence length, tokens per step.

    A sequence is one token longer than the task's, see `tasks.Batch.for_causal_lm`. A task with errors is
    left for `validate` to report.
    """
    if config.task is None or find_errors(config.task):
        return config
    task = training_task(config.task, config.seed)
    seq_len = task.seq_len + 1
    trainer = replace(config.trainer, seq_len=seq_len, global_batch_tokens=seq_len * config.task.batch_size)
    return with_model(replace(config, trainer=trainer), vocab_size=task.vocab_size)


def with_model(config: TrainConfig, **fields: Any) -> TrainConfig:
    """`config` with other values of these fields of its model."""
    return replace(config, model={**config.model, **fields})
