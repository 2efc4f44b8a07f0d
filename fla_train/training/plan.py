"""The plan of a run, before it starts: parameters, tokens, FLOPs, memory."""

from dataclasses import dataclass

from fla_train.data.cache import PreparedData
from fla_train.data.config import DataConfig
from fla_train.models.build import build_model_config, build_on_meta, is_zoo
from fla_train.models.flops import ParameterCount, count_parameters, flops_per_token, training_memory_bytes
from fla_train.models.zoo.flops import forward_flops
from fla_train.training.config import (
    TrainConfig,
    accumulation_steps,
    describe_processes,
    initial_state_kind,
    with_processes,
)
from fla_train.training.cuda_graph import records_graph
from fla_train.training.run_data import open_training_data
from fla_train.utils.throughput import peak_flops

ASSUMED_GPU, ASSUMED_MFU = "H100", 0.4  # for the estimate of GPU-hours
ENOUGH_SEQUENCES = 32  # of validation; the loss of fewer is rough


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; plan.json holds the same. What the data decide is None before they are prepared."""

    parameters: int  # as the papers count: the embedding once
    parameters_held: int  # with the head, unless it is tied to the embedding
    tokens: int  # of the whole run
    epochs: float | None  # tokens / tokens of the training split
    flops_per_token: float  # forward and backward
    memory_bytes: int  # estimate per process
    gpu_hours: float  # on H100s at the assumed utilisation
    accumulation: int  # micro-batches per rank and step
    training_tokens: int | None  # of the training split; None where it is streamed or not prepared
    validation_tokens: dict[str, int] | None  # of each part's validation split; "": no mixture
    unigram_entropy: float | None  # of the validation split, nats per token
    data_folder: str | None


def make_plan(config: TrainConfig, data: PreparedData | None) -> Plan:
    """Work out the plan.

    Raises:
        ValueError: a model config whose parts do not fit together, shards that are missing or cut short, or
            fewer training tokens than one sequence.
    """
    trainer = config.trainer
    train, validation = (data.manifest["splits"][split] if data else {} for split in ("train", "validation"))
    if data is not None and config.task is None:
        open_training_data(config, data)  # its errors belong before the start
    parts = data.parts().items() if data else ()
    held_out = {name: part.manifest["splits"]["validation"]["tokens"] for name, part in parts}
    node = config.model
    count = count_parameters(build_on_meta(node) if is_zoo(node) else build_model_config(node))
    tokens = trainer.max_steps * trainer.global_batch_tokens
    flops = training_flops(config)
    return Plan(
        parameters=count.embedding_once,
        parameters_held=count.total,
        tokens=tokens,
        epochs=tokens / train["tokens"] if train else None,
        flops_per_token=flops,
        memory_bytes=_memory(config, count),
        gpu_hours=flops * tokens / (ASSUMED_MFU * peak_flops(ASSUMED_GPU, "bf16")) / 3600,
        accumulation=accumulation_steps(config),
        training_tokens=None if config.data.stream else train.get("tokens"),
        validation_tokens=held_out if data else None,
        unigram_entropy=validation.get("unigram_entropy"),
        data_folder=str(data.folder) if data else None,
    )


def training_flops(config: TrainConfig) -> float:
    """FLOPs per token, forward and backward."""
    if is_zoo(config.model):
        return forward_flops(build_on_meta(config.model), config.trainer.seq_len).training
    return flops_per_token(build_model_config(config.model), config.trainer.seq_len)


def _memory(config: TrainConfig, count: ParameterCount) -> int:
    """Bytes per process; of another library's model those of weights, gradients and AdamW only."""
    trainer = config.trainer
    if is_zoo(config.model):
        return 8 * count.total + 8 * count.total // with_processes(config).launch.num_processes
    memory = training_memory_bytes(
        build_model_config(config.model),
        tokens_per_device=trainer.micro_batch_size * trainer.seq_len // config.launch.context_parallel,
        num_devices=config.launch.num_processes,
        element_size=2 if trainer.autocasts else 4,
        gradient_checkpointing=trainer.activation_checkpointing,
        accumulates=accumulation_steps(config) > 1,
    )
    # One byte in each of two orders. Without checkpointing they take the place of weights in bf16.
    in_float8 = trainer.precision == "fp8" and trainer.activation_checkpointing
    float8_weights = 2 * count.total if in_float8 else 0
    # A step with statistics runs without the graph, beside the activations that the graph keeps.
    beside_graph = memory.activations if records_graph(config) and trainer.stats_every else 0
    return memory.total + float8_weights + beside_graph + _state_bytes(config)


def _state_bytes(config: TrainConfig) -> int:
    """What `InitialStates` keeps on each process: of its rows of a step, and of one more micro-batch."""
    if initial_state_kind(config) == "zero":
        return 0
    model = build_model_config(config.model)
    layers = model.layer_types.count("linear_attention")
    row = 4 * layers * model.value_heads * model.head_dim * model.head_v_dim
    return row * config.trainer.micro_batch_size * (accumulation_steps(config) + 1)


def plan_lines(config: TrainConfig, plan: Plan) -> list[str]:
    """The plan for a reader."""
    trainer, launch = config.trainer, config.launch
    hours = (
        f"GPU-hours    about {plan.gpu_hours:,.0f}, if {ASSUMED_GPU}s ran at {ASSUMED_MFU:.0%} of their peak"
    )
    rounds = trainer.gradient_reduction == "bf16" and launch.num_processes > 1
    reduction = ", gradients added up over processes in bf16" if rounds else ""
    besides = ""
    if is_zoo(config.model):
        besides = ", besides what activations take"
    elif launch.device == "cpu" and trainer.precision == "fp32":
        besides = " in fp32; a GPU trains in bf16 and takes less: see it with trainer.precision=bf16"
    most = "at most " if config.task is not None and config.task.curriculum else ""
    return [
        f"parameters   {plan.parameters:,} with the embedding counted once, {plan.parameters_held:,} in all",
        f"tokens       {most}{plan.tokens:,} = {trainer.max_steps:,} steps x {trainer.global_batch_tokens:,}"
        + ("" if plan.epochs is None else f" ({plan.epochs:.2f} epochs)"),
        f"batch        {describe_processes(launch)} x {plan.accumulation} micro-batch(es) x "
        f"{trainer.micro_batch_size} sequences x {trainer.seq_len} tokens",
        f"FLOPs        {plan.flops_per_token:.3g} per token, {plan.flops_per_token * plan.tokens:.3g} in all",
        *([hours] if plan.gpu_hours >= 1 else []),
        f"memory       about {plan.memory_bytes / 2**30:.2f} GiB per process{besides}",
        f"schedule     {config.schedule.name}, peak {config.optimizer.lr:g}, "
        f"{config.schedule.warmup(trainer.max_steps)} warm-up steps",
        f"device       {launch.device}, {trainer.precision}{reduction}",
        *_mixer_lines(config),
        *_data_lines(config, plan),
        *_curriculum_lines(config),
        *_unread_lines(config),
    ]


def _mixer_lines(config: TrainConfig) -> list[str]:
    """How a mixer of the user's own was counted."""
    if config.model.get("mixer") is None:
        return []
    from fla_train.models.mixers.registry import linear_mixer  # imports the models: seconds

    mixer = linear_mixer(build_model_config(config.model))
    own = hasattr(mixer, "flops_per_token")
    flops = "as it counts them" if own else "those of its linear layers: it has no flops_per_token"
    return [f"mixer        {mixer.__name__}: FLOPs are {flops}; memory is estimated as for DeltaProduct"]


def _data_lines(config: TrainConfig, plan: Plan) -> list[str]:
    """Tokens of the splits, with warnings of parts that validation leaves out, and of a short split."""
    tokens, seq_len = plan.validation_tokens, config.trainer.seq_len
    if tokens is None:
        return ["data         not prepared yet: fla-prepare does it, or the start of the run"]
    held_out = sum(tokens.values())
    lines = []
    if config.task is None:
        training = "streamed" if plan.training_tokens is None else f"{plan.training_tokens:,} tokens"
        lines.append(f"data         {config.data.source}: training {training}, validation {held_out:,}")
        if seq_len <= held_out < ENOUGH_SEQUENCES * seq_len:
            lines.append(
                f"warning      validation has {held_out // seq_len} sequences of {seq_len:,} tokens: its "
                "loss is rough (raise data.validation_fraction)"
            )
    short = {name: count for name, count in tokens.items() if count < seq_len}
    lines += [
        f"warning      no validation{f' of {name}: its' if name else ': the'} split has {count:,} tokens, "
        f"fewer than one sequence of {seq_len:,} (raise data.validation_fraction)"
        for name, count in short.items()
    ]
    if len(short) == len(tokens) > 1:
        lines.append("warning      no validation at all: no part of the mixture is left")
    return lines


def _curriculum_lines(config: TrainConfig) -> list[str]:
    """Only a warning: a run may be cut into parts, or try out its first steps."""
    steps = sum(stage[1] for stage in config.task.curriculum) if config.task is not None else 0
    if steps < config.trainer.max_steps:
        return []
    return [
        f"warning      no step trains on the whole task: its curriculum takes {steps:,} steps "
        f"(raise trainer.max_steps={config.trainer.max_steps}, or shorten task.curriculum)"
    ]


def _unread_lines(config: TrainConfig) -> list[str]:
    """Only a warning: runs that were begun with such a config resume."""
    keys = ("source", "contiguous", "document_boundaries", "stream") if config.task is not None else ()
    unread = [f"data.{key}" for key in keys if getattr(config.data, key) != getattr(DataConfig, key)]
    return [f"warning      {', '.join(unread)}: not read, the task makes its sequences"] if unread else []
