"""The typed config of `fla-train`: the keys of `configs/train.yaml`, their checks, and what "auto" means.

Units and defaults stand with a comment in the YAML files. A new key is one field here, whose `key(...)` names
its limits, and one line of YAML. The dataclasses give Hydra the types, so an unknown key or a wrong type
fails before anything starts. `validate` reports all other errors together.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
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
from fla_train.models.configuration import DeltaProductConfig, model_schema
from fla_train.tasks import TaskConfig, training_task
from fla_train.training.log import log
from fla_train.utils.ranks import is_rank

AUTO = "auto"
FLOAT8_CAPABILITY = (8, 9)  # of a GPU
WARMUP_SHARE, WARMUP_CAP = 0.05, 512  # of the run, and never more than the papers' steps
# Keys of `model` that a recipe for our family may set though the model of another library does not read them
ZOO_KEYS = tuple(f"model.{name}" for name in (*NODE_KEYS, "hidden_size", "num_hidden_layers", "head_dim"))
OF_THE_TASK = ("trainer.seq_len=", "trainer.global_batch_tokens=", "model.vocab_size=")  # overrides
DECAY_SHARE = 0.2  # of the run, for `wsd`
VOCABULARY_MULTIPLE = 64  # matmuls with the head are slow at odd sizes


def key(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[bool | str, ...] = (),
) -> Any:
    """A field with limits, which `validate` checks. A number may also be null, or "auto" if its type says so.

    Keys with a default may be absent from the config.yaml of a run that was begun before they existed.
    """
    limits = {
        "at least": (at_least, lambda value, bound: value >= bound),
        "at most": (at_most, lambda value, bound: value <= bound),
        "above": (above, lambda value, bound: value > bound),
        "below": (below, lambda value, bound: value < bound),
    }
    given = {words: limit for words, limit in limits.items() if limit[0] is not None}
    return field(default=default, metadata={"limits": given, "choices": choices})


@dataclass
class OptimizerConfig:
    name: str = key(choices=("adamw", "muon"))
    lr: float = key(at_least=0)
    weight_decay: float = key(at_least=0)
    beta1: float = key(at_least=0, below=1)
    beta2: float = key(at_least=0, below=1)
    eps: float = key(above=0)  # a weight without a gradient would become 0 / 0
    max_grad_norm: float = key(at_least=0)
    momentum: float | None = key(None, at_least=0, below=1)

    def errors(self) -> Iterator[str]:
        if self.name != "muon" and self.momentum is not None:
            yield f"optimizer.momentum={self.momentum} is for optimizer=muon only: leave it at null"
        if self.name == "muon" and self.momentum is None:
            yield "optimizer.momentum=null must be a number in [0, 1) for optimizer=muon"


@dataclass
class ScheduleConfig:
    name: str = key(choices=("cosine", "linear", "wsd", "constant"))
    warmup_steps: int | None = key(None, at_least=0)
    start_ratio: float = key(0.0, at_least=0, at_most=1)
    decay_steps: int | None = key(None, at_least=0)
    min_ratio: float = key(at_least=0, at_most=1)

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
    seq_len: int = key(at_least=2)  # one token leaves none to predict
    global_batch_tokens: int | str = key(at_least=1)
    micro_batch_size: int = key(at_least=1)
    precision: str = key(choices=("auto", "bf16", "fp8", "fp32"))
    activation_checkpointing: bool | str = key(choices=(True, False, SELECTIVE))
    log_every: int = key(at_least=1)
    eval_every: int = key(at_least=0)
    eval_tokens: int = key(at_least=1)
    checkpoint_every: int = key(at_least=0)
    keep_checkpoints: int = key(at_least=0)
    export_every: int = key(at_least=0)
    resume: str = MISSING
    max_skipped_steps: int = key(at_least=1)
    check_backend: bool = MISSING
    target_batch_tokens: int = key(16384, at_least=1)
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

    def __post_init__(self) -> None:
        given = self.activation_checkpointing
        if isinstance(given, str):  # quoted, or of an environment variable
            self.activation_checkpointing = {"true": True, "false": False}.get(given.lower(), given)

    @property
    def autocasts(self) -> bool:
        """Whether matrix products run in bf16 but for those in float8."""
        return self.precision in ("bf16", "fp8")

    def errors(self) -> Iterator[str]:
        if self.keep_every and not self.keep_checkpoints:
            yield "trainer.keep_every has no effect with trainer.keep_checkpoints=0, which keeps all"
        if outside := [step for step in self.profile_steps if not 1 <= step <= self.max_steps]:
            yield f"trainer.profile_steps={outside} must lie in 1..{self.max_steps}, the steps of the run"
        noise = self.state_noise
        if noise != "fitted" and (isinstance(noise, str) or noise <= 0):
            yield f"trainer.state_noise={noise} must be fitted, or a standard deviation above 0"
        if self.suite_every:
            folder = files("fla_train.configs") / "suite"
            suites = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
            if self.suite not in suites:
                yield f"trainer.suite={self.suite} is none of {', '.join(suites)}"


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
        if self.context_parallel > 1 and self.overlap_communication:
            yield (
                "launch.overlap_communication=true cannot be had with launch.context_parallel above 1: set "
                "it to false"
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

    model: Any = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    hub: HubConfig = field(default_factory=HubConfig)
    run: RunConfig = field(default_factory=RunConfig)
    init_from: str | None = None
    seed: int = key(at_least=0)
    dry_run: bool = MISSING

    def errors(self) -> Iterator[str]:
        """Every setting that cannot work, one line each; `with_processes` has filled in their number."""
        yield from _limit_errors("", self)
        yield from _number_errors("", asdict(self))
        yield from self.optimizer.errors()
        yield from self.trainer.errors()
        yield from self.hub.errors()
        yield from _model_errors(self)
        yield from _state_errors(self)
        yield from _resume_errors(self)
        yield from _package_errors(self)
        if self.run.dir == "":  # `run.dir=$RUN` without RUN: a run that could never be resumed
            yield "run.dir is empty: give a folder, or null for a new one in runs/"
        if self.launch.num_machines > 1 and self.run.dir is None and not self.dry_run:
            yield "launch.num_machines > 1 needs run.dir: one folder, on a file system all machines share"
        if self.task is not None and self.trainer.suite_every:
            yield "trainer.suite_every is for training on text: a task has its own test sets"
        data = self.data.validation_errors() if self.task is None else self.task.validation_errors()
        yield from data
        if self._has_sizes():  # the arithmetic below divides by them
            sized = with_batch(self)
            yield from self.launch.errors()
            yield from self.schedule.errors(self.trainer.max_steps)
            if not self.dry_run:  # which may plan for machines that are not here
                yield from _device_errors(self)
            yield from _context_errors(self)
            yield from _float8_errors(self)
            if self.task is None:
                yield from _batch_errors(sized)
            if self.task is not None and not data:
                yield from _task_batch_errors(self)
            if self.task is None or not data:  # sizes follow from a task without errors
                yield from _cuda_graph_errors(sized)

    def _has_sizes(self) -> bool:
        trainer, launch = self.trainer, self.launch
        sizes = (trainer.max_steps, trainer.seq_len, trainer.micro_batch_size, launch.num_machines)
        batch = (
            trainer.target_batch_tokens
            if trainer.global_batch_tokens == AUTO
            else trainer.global_batch_tokens
        )
        return all(type(size) is int and size >= 1 for size in (*sizes, launch.num_processes, batch))


def validate(config: TrainConfig) -> None:
    """Check every value against its limits, the others and this machine.

    Raises:
        ValueError: one line per error, each naming the key and a value that would do.
    """
    if errors := list(with_processes(config).errors()):
        raise ValueError("\n  ".join(errors))


def check_attributes(config: TrainConfig) -> None:
    """Refuse what a program set on a section that has no such field: Python would keep it unread.

    Raises:
        ValueError: naming them.
    """

    def unknown(prefix: str, section: Any) -> Iterator[str]:
        if is_dataclass(section):
            names = {field.name for field in fields(section)}
            for name, value in vars(section).items():
                yield from unknown(f"{prefix}.{name}", value) if name in names else [f"{prefix}.{name}"]

    if found := list(unknown("config", config)):
        raise ValueError(f"there is no {' and no '.join(found)}: see docs/configuration.md")


def _limit_errors(prefix: str, section: Any) -> Iterator[str]:
    """Values outside the limits of their `key`, in a section and those in it."""
    for entry in fields(section):
        name, value = f"{prefix}{entry.name}", getattr(section, entry.name)
        limits, choices = entry.metadata.get("limits", {}), entry.metadata.get("choices", ())
        if is_dataclass(value):
            yield from _limit_errors(f"{name}.", value)
        elif choices and value not in choices:
            shown = ", ".join(str(choice).lower() for choice in choices)
            yield f"{name}={value} is not one of {shown}"
        elif limits and isinstance(value, str) and value != AUTO:
            yield f"{name}={value} must be a number, or auto"
        elif isinstance(value, int | float) and not all(
            holds(value, bound) for bound, holds in limits.values()
        ):
            words = " and ".join(f"{words} {bound:g}" for words, (bound, _) in limits.items())
            yield f"{name}={value} must be {words}"


def _number_errors(name: str, value: object) -> Iterator[str]:
    """Numbers that neither a timer nor a tensor or a random generator takes, wherever they stand."""
    if isinstance(value, dict):
        for inner, content in value.items():
            yield from _number_errors(f"{name}.{inner}".removeprefix("."), content)
    elif isinstance(value, list):
        for content in value:
            yield from _number_errors(name, content)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{name}={value} must be a finite number"
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield f"{name}={value} must lie in -2^63..2^63 - 1"


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
                    f"data.document_boundaries=true cannot be had with {config.model['model_type']}, whose "
                    "layers carry a state across the documents of a packed row: set it to false"
                )
    except ValueError as error:
        yield str(error)


def _state_errors(config: TrainConfig) -> Iterator[str]:
    """What sequences can't start from. A model that can't be built has its error already."""
    initial = f"trainer.initial_state={config.trainer.initial_state}"
    kind = initial_state_kind(config)
    contiguous = kind == "contiguous"
    if contiguous and config.trainer.initial_state != "zero":
        yield f"data.contiguous=true starts from each row's own states, not from {initial}: set that to zero"
    if kind == "zero":
        return
    setting, otherwise = ("data.contiguous=true", "false") if contiguous else (initial, "zero")
    if is_zoo(config.model):
        yield (
            f"{setting} cannot be had with {config.model['model_type']}, whose layers take no states in "
            f"training: set it to {otherwise}, or choose a model of this package"
        )
        return
    try:
        settings = build_model_config(config.model)
    except ValueError:
        return
    if "linear_attention" not in settings.layer_types:
        yield f"{setting} has no effect without linear_attention layers: set it to {otherwise}"
    if settings.mixer is None:
        return
    from fla_train.models.mixers.delta_product import DeltaProductMixer  # seconds
    from fla_train.models.mixers.registry import MixerError, linear_mixer, takes_cache

    try:
        mixer = linear_mixer(settings)
    except MixerError:
        return
    packed = config.task is None and config.data.document_boundaries
    if not takes_cache(mixer):
        yield (
            f"{setting} cannot be had with the mixer {settings.mixer}, which keeps no states: set it to "
            f"{otherwise}, or give its forward the parameter cache (docs/mixers.md)"
        )
    elif packed and not issubclass(mixer, DeltaProductMixer):  # which knows rows from documents
        yield (
            f"{setting} cannot be had with both the mixer {settings.mixer} and data.document_boundaries: set "
            "one of them to its default"
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
    """What context parallelism does not do; the model's own errors come from `_model_errors`."""
    trainer, parts, model = config.trainer, config.launch.context_parallel, config.model
    if parts == 1:
        return
    name = f"launch.context_parallel={parts}"
    if config.task is not None:
        yield f"{name} is for training on text: use 1 for a task, whose sequences are short"
    elif is_zoo(model) or model.get("mixer") is not None:
        what = "a mixer of your own" if model.get("mixer") is not None else f"a {model['model_type']} model"
        yield f"{name} cannot be had with {what}, which needs whole sequences: use 1, or another model"
    elif initial_state_kind(config) != "zero":
        yield f"{name} cannot be had with trainer.initial_state or data.contiguous: leave both out"
    elif trainer.activation_checkpointing == SELECTIVE:
        yield f"{name} cannot be had with trainer.activation_checkpointing=selective: use true"
    elif trainer.seq_len % parts:
        yield f"{name} does not divide trainer.seq_len={trainer.seq_len}: use a multiple of {parts} tokens"
    elif trainer.seq_len // parts < model["conv_size"]:
        yield f"{name} leaves parts of {trainer.seq_len // parts} tokens: use a longer trainer.seq_len"


def _task_batch_errors(config: TrainConfig) -> Iterator[str]:
    task, processes = config.task, config.launch.num_processes
    unit = config.trainer.micro_batch_size * processes
    if task.batch_size % unit:
        yield f"task.batch_size={task.batch_size} is not a multiple of {unit} = micro_batch_size x processes"
    if task.test_sequences < processes:
        yield f"task.test_sequences={task.test_sequences} leaves processes without a sequence"


def _cuda_graph_errors(config: TrainConfig) -> Iterator[str]:
    """A graph holds one pass of one process, of inputs whose shapes stay."""
    against = {
        "launch.num_processes above 1": config.launch.num_processes > 1,
        "several micro-batches a step": accumulation_steps(config) > 1,
        "data.document_boundaries": config.task is None and config.data.document_boundaries,
    }
    if config.trainer.cuda_graph:
        for what in (what for what, there in against.items() if there):
            yield f"trainer.cuda_graph=true cannot be had with {what}: set it to false"


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
    """What float8 needs of the machine and the model."""
    if config.trainer.precision != "fp8":
        return
    other = "set trainer.precision=bf16"
    if is_zoo(config.model):
        yield f"trainer.precision=fp8 is for this package's own models: {other}"
    if resolve_device(config) != "cuda":
        yield f"trainer.precision=fp8 needs a GPU: {other}, or fp32 on a CPU"
    elif torch.cuda.is_available() and (found := torch.cuda.get_device_capability()) < FLOAT8_CAPABILITY:
        yield (
            f"trainer.precision=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper) or later, this one "
            f"has {found[0]}.{found[1]}: {other}"
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
    """Put the schemas that `train.yaml` merges in Hydra's ConfigStore; `root` may add keys."""
    OmegaConf.register_new_resolver("product", lambda *numbers: int(math.prod(numbers)), replace=True)
    store = ConfigStore.instance()
    store.store(name="train_schema", node=root)
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
    node = dict(node)
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


def initial_state_kind(config: TrainConfig) -> str:
    """What training sequences start from: zero, passing, noise, or contiguous for the text before them."""
    if config.task is None and config.data.contiguous:
        return "contiguous"
    return config.trainer.initial_state


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
    if config.task is None or config.task.validation_errors():
        return config
    task = training_task(config.task, config.seed)
    seq_len = task.seq_len + 1
    trainer = replace(config.trainer, seq_len=seq_len, global_batch_tokens=seq_len * config.task.batch_size)
    return with_model(replace(config, trainer=trainer), vocab_size=task.vocab_size)


def with_model(config: TrainConfig, **fields: Any) -> TrainConfig:
    """`config` with other values of these fields of its model."""
    return replace(config, model={**config.model, **fields})
