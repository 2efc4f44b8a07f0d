"""Check the model of a config, and a whole config after `resolve` has filled in its sizes.

Checks of single keys and sections are in `config.py`. `CONFLICTS` lists pairs of options that exclude each
other. A check that needs more than a pair is a function in this module.
"""

from collections.abc import Callable, Iterator

import torch

from fla_train.models.activation_checkpointing import SELECTIVE
from fla_train.models.build import architecture, build_on_meta, is_zoo, model_settings
from fla_train.models.flops import custom_mixers
from fla_train.models.zoo.flops import forward_flops
from fla_train.training.callback import Callback, make_callbacks
from fla_train.training.config import TrainConfig
from fla_train.training.features.context_parallel import ContextParallel
from fla_train.training.features.cuda_graph import CudaGraph, records_graph
from fla_train.training.features.float8 import Float8
from fla_train.training.features.initial_states import InitialStates
from fla_train.training.features.profile import Profile
from fla_train.training.optimizer import check_elementwise


def _mixes_documents(config: TrainConfig) -> bool:
    """Return whether a model of another library has recurrences. Those of fla take document bounds."""
    other = config.model.get("source", "fla") != "fla"
    return other and forward_flops(build_on_meta(config.model), config.trainer.seq_len).recurrences


def _lacks_cache(config: TrainConfig) -> bool:
    """Return whether a custom mixer can't continue from states of earlier tokens."""
    if config.model.get("mixer") is None:
        return False
    from fla_train.models.mixers.delta_product import DeltaProductMixer  # imports the models: seconds
    from fla_train.models.mixers.registry import linear_mixer, takes_cache

    mixer = linear_mixer(model_settings(config.model))
    return not takes_cache(mixer) or (config.packs_documents and not issubclass(mixer, DeltaProductMixer))


NO_STATES = "model.mixer={mixer}, without a cache or with data.document_boundaries=true"
# Conditions on a resolved config, by their names in errors, in which {KEY} is a key of the model.
CONDITIONS: dict[str, Callable[[TrainConfig], bool]] = {
    "a synthetic task": lambda c: c.task is not None,
    "a model of another library": lambda c: is_zoo(c.model),
    "a model without linear_attention": lambda c: is_zoo(c.model) or architecture(c.model) == "transformer",
    "model.model_type={model_type}, which mixes documents": _mixes_documents,
    "model.mixer": lambda c: c.model.get("mixer") is not None,
    NO_STATES: _lacks_cache,
    "data.contiguous=true": lambda c: c.initial_states == "contiguous",
    "data.contiguous or trainer.initial_state": lambda c: c.initial_states != "zero",
    "data.document_boundaries=true": lambda c: c.packs_documents,
    "launch.context_parallel above 1": lambda c: c.launch.context_parallel > 1,
    "launch.device=cpu": lambda c: c.launch.device == "cpu",
    "launch.num_processes above 1": lambda c: c.launch.num_processes > 1,
    "several micro-batches a step": lambda c: c.num_accumulated > 1,
    "trainer.activation_checkpointing=selective": lambda c: c.trainer.activation_checkpointing == SELECTIVE,
    "trainer.callbacks with after_loss": lambda c: any(
        type(x).after_loss is not Callback.after_loss for x in make_callbacks(c.trainer.callbacks)
    ),
    "trainer.cuda_graph=true": lambda c: c.trainer.cuda_graph,
    "trainer.initial_state other than zero": lambda c: c.trainer.initial_state != "zero",
    "trainer.precision=fp8": lambda c: c.trainer.precision == "fp8",
    "trainer.suite_every above 0": lambda c: c.trainer.suite_every > 0,
}
# Pairs of conditions that exclude each other.
CONFLICTS = (
    ("data.contiguous=true", "trainer.initial_state other than zero"),
    ("data.contiguous or trainer.initial_state", "a model without linear_attention"),
    ("data.contiguous or trainer.initial_state", "launch.context_parallel above 1"),
    ("data.contiguous or trainer.initial_state", NO_STATES),
    ("data.document_boundaries=true", "model.model_type={model_type}, which mixes documents"),
    ("launch.context_parallel above 1", "a model of another library"),
    ("launch.context_parallel above 1", "a synthetic task"),
    ("launch.context_parallel above 1", "model.mixer"),
    ("launch.context_parallel above 1", "trainer.activation_checkpointing=selective"),
    ("trainer.cuda_graph=true", "data.document_boundaries=true"),
    ("trainer.cuda_graph=true", "launch.num_processes above 1"),
    ("trainer.cuda_graph=true", "several micro-batches a step"),
    ("trainer.cuda_graph=true", "trainer.callbacks with after_loss"),  # replayed kernels run no Python
    ("trainer.precision=fp8", "a model of another library"),
    ("trainer.precision=fp8", "launch.device=cpu"),
    ("trainer.suite_every above 0", "a synthetic task"),
)


def find_model_errors(config: TrainConfig) -> Iterator[str]:
    """Yield the error of a model that can't be built."""
    try:
        settings = model_settings(config.model)
        if config.model.get("mixer") is not None:
            custom_mixers(settings)
    except ValueError as error:
        yield str(error)


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield an error for each pair of options in `CONFLICTS` that a resolved config combines."""
    for option, other in CONFLICTS:
        if CONDITIONS[option](config) and CONDITIONS[other](config):
            yield f"{option} is not supported with {other.format(**config.model)}: change one of them"


def find_misfits(config: TrainConfig) -> list[str]:
    """List the settings of a config that conflict with each other or with this machine.

    `find_late_misfits` checks those that need the number of steps.
    """
    return [
        *_optimizer_errors(config),
        *_launch_errors(config),
        *_device_errors(config),
        *find_conflicts(config),
        *_batch_errors(config),
        *(line for feature in features_of(config) for line in feature.check(config)),
    ]


def find_late_misfits(config: TrainConfig) -> list[str]:
    """List the settings that do not fit the number of steps, and the errors of custom callbacks."""
    errors = [*Profile().check(config), *_schedule_errors(config)]
    for callback in make_callbacks(config.trainer.callbacks):
        errors += [f"{callback.name}: {line}" for line in callback.check(config)]
    return errors


def features_of(config: TrainConfig) -> list[Callback]:
    """Return the features that change how a resolved config computes its steps."""
    used: dict[type[Callback], bool] = {
        ContextParallel: config.launch.context_parallel > 1,
        Float8: config.trainer.precision == "fp8",
        InitialStates: config.initial_states != "zero",
        CudaGraph: records_graph(config),
    }
    return [feature() for feature in used if used[feature]]


def _schedule_errors(config: TrainConfig) -> Iterator[str]:
    trainer, schedule = config.trainer, config.schedule
    if ":" in schedule.name:  # a custom schedule reads only its options
        return
    after_warmup = trainer.max_steps - schedule.warmup(trainer.max_steps)
    if after_warmup < 0:
        yield f"schedule.warmup_steps={schedule.warmup_steps} exceeds trainer.max_steps={trainer.max_steps}"
    elif (schedule.decay_steps or 0) > after_warmup:
        yield f"schedule.decay_steps={schedule.decay_steps} must lie in 0..{after_warmup}, the steps left"


def _optimizer_errors(config: TrainConfig) -> Iterator[str]:
    if ":" in config.optimizer.name:
        try:
            check_elementwise(config.optimizer)
        except ValueError as error:
            yield str(error)


def _launch_errors(config: TrainConfig) -> Iterator[str]:
    processes = config.launch.num_processes  # number on all machines together
    if (config.launch.machine_rank or 0) not in range(config.launch.num_machines):
        yield f"launch.machine_rank={config.launch.machine_rank} must be below launch.num_machines"
    for name in ("num_machines", "context_parallel"):
        if processes % (divisor := getattr(config.launch, name)):
            yield f"launch.num_processes={processes} is not a multiple of launch.{name}={divisor}"


def _device_errors(config: TrainConfig) -> Iterator[str]:
    launch = config.launch
    if launch.device != "cuda" or config.dry_run:  # a dry run may plan for another machine
        return
    present = torch.cuda.device_count()
    needed = launch.num_processes // launch.num_machines
    if needed > present:
        remedy = f"launch.num_processes={present * launch.num_machines}" if present else "launch.device=cpu"
        yield f"launch.num_processes={launch.num_processes} on GPUs: this machine has {present}, use {remedy}"


def _batch_errors(config: TrainConfig) -> Iterator[str]:
    trainer, task = config.trainer, config.task
    name, size = ("trainer.global_batch_tokens", 1) if task is None else ("task.batch_size", trainer.seq_len)
    batch, unit = trainer.global_batch_tokens // size, config.batch_unit // size
    if batch % unit:
        below = batch // unit * unit
        yield (
            f"{name}={batch} is not a multiple of {unit}, which micro_batch_size {trainer.micro_batch_size} "
            f"on {config.launch.describe()} needs: use {f'{below} or ' if below else ''}{below + unit}, or "
            "another trainer.micro_batch_size"
        )
    if task is not None and task.test_sequences < config.launch.num_processes:
        yield f"task.test_sequences={task.test_sequences} leaves processes without a sequence"
