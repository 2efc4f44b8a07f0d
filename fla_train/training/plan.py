"""What a run will cost, worked out before it starts."""

from dataclasses import dataclass

from fla_train.data import PreparedData, TokenDataset
from fla_train.models import build_config
from fla_train.models.accounting import count_parameters, flops_per_token, training_memory_bytes
from fla_train.training.schedule import warmup_steps
from fla_train.training.schema import TrainConfig
from fla_train.training.validate import accumulation_steps


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; plan.json holds the same."""

    parameters: int  # as the papers count: the embedding once
    parameters_held: int  # with the head, unless it is tied to the embedding
    tokens: int  # of the whole run
    epochs: float  # tokens / tokens of the training split
    flops_per_token: float  # forward and backward
    memory_bytes: int  # estimate per process
    accumulation: int  # micro-batches per rank and step
    validation_tokens: int  # of the validation split
    unigram_entropy: float | None  # of the same, nats per token
    data_folder: str


def make_plan(config: TrainConfig, data: PreparedData) -> Plan:
    """Work out the plan.

    Raises:
        ValueError: a model config whose parts do not fit together, shards that are missing or cut short, or
            fewer training tokens than one sequence.
    """
    trainer, splits = config.trainer, data.manifest["splits"]
    TokenDataset(data.folder, "train", trainer.seq_len)  # its faults belong before the start
    model = build_config(config.model)
    count = count_parameters(model)
    memory = training_memory_bytes(
        model,
        tokens_per_device=trainer.micro_batch_size * trainer.seq_len,
        num_devices=config.launch.num_processes,
        element_size=2 if trainer.precision == "bf16" else 4,
        gradient_checkpointing=trainer.activation_checkpointing,
    )
    tokens = trainer.max_steps * trainer.global_batch_tokens
    return Plan(
        parameters=count.embedding_once,
        parameters_held=count.total,
        tokens=tokens,
        epochs=tokens / splits["train"]["tokens"],
        flops_per_token=flops_per_token(model, trainer.seq_len),
        memory_bytes=memory.total,
        accumulation=accumulation_steps(config),
        validation_tokens=splits["validation"]["tokens"],
        unigram_entropy=splits["validation"]["unigram_entropy"],
        data_folder=str(data.folder),
    )


def plan_lines(config: TrainConfig, plan: Plan) -> list[str]:
    """The plan for a reader."""
    trainer, launch = config.trainer, config.launch
    return [
        f"parameters   {plan.parameters:,} with the embedding counted once, {plan.parameters_held:,} in all",
        f"tokens       {plan.tokens:,} = {trainer.max_steps:,} steps x {trainer.global_batch_tokens:,} "
        f"({plan.epochs:.2f} epochs)",
        f"batch        {launch.num_processes} process(es) x {plan.accumulation} micro-batch(es) x "
        f"{trainer.micro_batch_size} sequences x {trainer.seq_len} tokens",
        f"FLOPs        {plan.flops_per_token:.3g} per token, {plan.flops_per_token * plan.tokens:.3g} in all",
        f"memory       about {plan.memory_bytes / 2**30:.2f} GiB per process",
        f"schedule     {config.schedule.name}, peak {config.optimizer.lr:g}, "
        f"{warmup_steps(config.schedule, trainer.max_steps)} warm-up steps",
        f"device       {launch.device}, {trainer.precision}",
        *_validation_warning(plan.validation_tokens, trainer.seq_len),
    ]


def _validation_warning(tokens: int, seq_len: int) -> list[str]:
    if tokens >= seq_len:
        return []
    return [
        f"warning      no validation: the split has {tokens:,} tokens, fewer than one sequence of "
        f"{seq_len:,} (raise data.validation_fraction)"
    ]
