"""Check the model of a config, and a whole config after `resolve` has filled in its sizes.

Checks of single keys and sections are in `config.py`. `CONFLICTS` lists pairs of options that exclude each
other. A check that needs more than a pair is a function in this module.
"""

from collections.abc import Callable, Iterator

import torch

from fla_train.models.activation_checkpointing import SELECTIVE
from fla_train.models.build import build_model_config, build_on_meta, is_zoo
from fla_train.models.configuration import DeltaProductConfig
from fla_train.training.callback import Callback, make_callbacks
from fla_train.training.config import TrainConfig
from fla_train.training.features.initial_states import InitialStates
from fla_train.training.optimizer import check_elementwise

# Conditions on a resolved config, by their names in errors.
CONDITIONS: dict[str, Callable[[TrainConfig], bool]] = {
    "a synthetic task": lambda c: c.task is not None,
    "a model of another library": lambda c: is_zoo(c.model),
    "model.mixer": lambda c: c.model.get("mixer") is not None,
    "data.contiguous=true": lambda c: c.initial_states == "contiguous",
    "data.document_boundaries=true": lambda c: c.task is None and c.data.document_boundaries,
    "launch.context_parallel above 1": lambda c: c.launch.context_parallel > 1,
    "launch.device=cpu": lambda c: c.launch.device == "cpu",
    "launch.num_processes above 1": lambda c: c.launch.num_processes > 1,
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
# Pairs of conditions that exclude each other.
CONFLICTS: dict[str, tuple[str, ...]] = {
    "data.contiguous=true": ("a model of another library", "trainer.initial_state other than zero"),
    "launch.context_parallel above 1": (
        "a model of another library",
        "a synthetic task",
        "data.contiguous=true",
        "model.mixer",
        "trainer.activation_checkpointing=selective",
        "trainer.initial_state other than zero",
    ),
    "trainer.cuda_graph=true": (
        "data.document_boundaries=true",
        "launch.num_processes above 1",
        "several micro-batches a step",
        # Replayed kernels run no Python.
        "trainer.callbacks with after_loss",
    ),
    "trainer.initial_state other than zero": ("a model of another library",),
    "trainer.precision=fp8": ("a model of another library", "launch.device=cpu"),
    "trainer.suite_every above 0": ("a synthetic task",),
}


def find_model_errors(config: TrainConfig) -> Iterator[str]:
    """Yield the error of a model that can't be built, or that can't keep the documents of a row apart."""
    try:
        settings = build_model_config(config.model)
        if isinstance(settings, DeltaProductConfig) and settings.mixer is not None:
            from fla_train.models.mixers.registry import check_mixer  # imports the models: seconds

            check_mixer(settings)
        documents = config.task is None and config.data.document_boundaries
        if documents and config.model.get("source", "fla") != "fla":  # fla's layers accept document bounds
            from fla_train.models.zoo.flops import forward_flops  # imports the models: seconds

            if forward_flops(build_on_meta(config.model), config.trainer.seq_len).recurrences:
                yield f"{config.model['model_type']} mixes documents: set data.document_boundaries=false"
    except ValueError as error:
        yield str(error)


def find_conflicts(config: TrainConfig) -> Iterator[str]:
    """Yield an error for each pair of options in `CONFLICTS` that a resolved config combines."""
    for option, others in CONFLICTS.items():
        for other in others:
            if CONDITIONS[option](config) and CONDITIONS[other](config):
                yield f"{option} is not supported with {other}: change one of them"


def find_misfits(config: TrainConfig) -> list[str]:
    """List the settings of a resolved config that conflict with each other or with this machine.

    Settings that need the number of steps, and those of features, are checked once `max_steps` is known.
    """
    errors = [
        *_optimizer_errors(config),
        *_launch_errors(config),
        *_device_errors(config),
        *find_conflicts(config),
        *_context_errors(config),
        *(_batch_errors(config) if config.task is None else _task_batch_errors(config)),
    ]
    if config.trainer.max_steps is not None:
        errors += _schedule_errors(config)
        for feature in planned_features(config):
            errors += [f"{feature.name}: {line}" for line in feature.check(config)]
    return errors


def planned_features(config: TrainConfig) -> list[Callback]:
    """Return the features and callbacks of a run that check its config and count their memory."""
    states = [InitialStates(config)] if config.initial_states != "zero" else []
    return states + make_callbacks(config.trainer.callbacks)


def _schedule_errors(config: TrainConfig) -> Iterator[str]:
    trainer, schedule = config.trainer, config.schedule
    if outside := [step for step in trainer.profile_steps if not 1 <= step <= trainer.max_steps]:
        yield f"trainer.profile_steps={outside} must lie in 1..{trainer.max_steps}"
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
    processes = config.launch.num_processes  # of all machines together
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
    elif config.trainer.precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        yield "trainer.precision=fp8 needs a GPU of compute capability 8.9 (Ada, Hopper): set it to bf16"


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


def _batch_errors(config: TrainConfig) -> Iterator[str]:
    trainer, unit = config.trainer, config.batch_unit
    if trainer.global_batch_tokens % unit:
        below = trainer.global_batch_tokens // unit * unit
        yield (
            f"trainer.global_batch_tokens={trainer.global_batch_tokens} is not a multiple of {unit} = "
            f"seq_len {trainer.seq_len} x micro_batch_size {trainer.micro_batch_size} x "
            f"{config.launch.describe()}: use {f'{below} or ' if below else ''}{below + unit}, another "
            "trainer.micro_batch_size, or auto"
        )
