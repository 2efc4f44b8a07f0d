"""Compute the plan of a run: resolved config, parameters, tokens, FLOPs, time, memory and disk."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from fla_train.data.cache import PreparedData, open_prepared
from fla_train.hub.saved_config import escaped
from fla_train.models.build import countable, is_zoo
from fla_train.models.flops import ParameterCount, count_parameters, flops_per_token
from fla_train.models.zoo.flops import forward_flops
from fla_train.training.callback import make_callbacks
from fla_train.training.checks import features_of
from fla_train.training.config import TrainConfig, to_config
from fla_train.training.memory import training_memory
from fla_train.training.run_data import open_training_data, task_data
from fla_train.utils.safe_files import read_json
from fla_train.utils.throughput import peak_flops

# GPU and utilization that the estimate of hours assumes.
ASSUMED_GPU, ASSUMED_MFU = "H100", 0.4
# Memory of GPUs in GB, and the fraction of it that the estimate may use.
GPU_SIZES, USABLE = (40, 80), 0.95
CHECKPOINT_BYTES, EXPORT_BYTES = 12, 4  # per parameter: fp32 weight and two moments; weight
# Minimum numbers for a precise validation loss.
ENOUGH_SEQUENCES, ENOUGH_DOCUMENTS = 32, 20
# Tolerated ratio of requested tokens to the tokens on a subset's card, because tokenizers differ.
MORE_TOKENS = 1.2


@dataclass(frozen=True)
class RunPlan:
    """Hold all facts that are known about a run before it starts. `plan.json` holds these fields.

    Attributes:
        request: the user's request, with absolute paths. `config.yaml` records it.
        config: the request with every open value filled in. Only a new run still sets its `run.dir`.
        parameters: number as the papers count, with the embedding once.
        parameters_held: number including the head, unless it is tied to the embedding.
        tokens: tokens of the whole run.
        epochs: tokens divided by those of the training split; before it is prepared, by its limit.
        flops_per_token: FLOPs of forward and backward pass.
        memory_bytes: estimate per process.
        gpu_hours: flops_per_token * tokens / (assumed utilization * peak of a GPU).
        run_bytes: estimate of the run folder at its largest.
        data_bytes: size of the tokens to prepare; None if prepared, or if their number is unknown.
        training_tokens: tokens of the training split; None if it is streamed or not prepared.
        validation_tokens: tokens of the validation split by corpus of a mixture ("" without a mixture);
            None: not prepared.
        validation_documents: documents of these splits.
        unigram_entropy: entropy of the validation split, nats per token.
        data_folder: the prepared data; None: not prepared.
    """

    request: TrainConfig
    config: TrainConfig
    parameters: int
    parameters_held: int
    tokens: int
    epochs: float | None
    flops_per_token: float
    memory_bytes: int
    gpu_hours: float
    run_bytes: int
    data_bytes: int | None
    training_tokens: int | None
    validation_tokens: dict[str, int] | None
    validation_documents: dict[str, int] | None
    unigram_entropy: float | None
    data_folder: str | None

    def open_data(self) -> PreparedData:
        """Open the prepared text, or describe the task as data."""
        task = self.config.task
        return open_prepared(self.data_folder) if task is None else task_data(task, self.config.seed)

    def to_json(self) -> str:
        """Return the content of `plan.json`."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_plan(path: Path) -> RunPlan:
    """Read a `plan.json`.

    Raises:
        OSError: it can't be read.
        ValueError: it is damaged, or has fields of another version.
    """
    try:
        content = read_json(path)
        for name in ("request", "config"):
            content[name] = to_config(escaped(content[name]))
        return RunPlan(**content)
    except (AttributeError, KeyError, TypeError, OmegaConfBaseException) as error:
        raise ValueError(f"{path} is not a plan of this version: {' '.join(str(error).split())}") from error


def make_plan(request: TrainConfig, config: TrainConfig, data: PreparedData | None) -> RunPlan:
    """Compute the plan of a resolved config.

    Raises:
        ValueError: shards are missing or truncated, or hold fewer training tokens than one sequence.
    """
    trainer = config.trainer
    train, validation = (data.manifest["splits"][split] if data else {} for split in ("train", "validation"))
    if data is not None and config.task is None:
        open_training_data(config, data)  # raises its errors before the start
    model = countable(config.model)
    count = count_parameters(model)
    tokens = trainer.max_steps * trainer.global_batch_tokens
    zoo = is_zoo(config.model)
    flops = forward_flops(model, trainer.seq_len).training if zoo else flops_per_token(model, trainer.seq_len)
    peak = peak_flops(ASSUMED_GPU, "bf16", config.launch.peak_tflops)
    most = config.data.max_tokens or config.data.subset_tokens.get(str(config.data.name))
    to_prepare = None if data is not None or config.data.stream else most
    training_tokens = train.get("tokens", to_prepare)
    width = 2 if (config.model["vocab_size"] or 0) <= 1 << 16 else 4
    corpora = data.corpora().items() if data else ()
    held_out = {name: corpus.manifest["splits"]["validation"] for name, corpus in corpora}
    return RunPlan(
        request=request,
        config=config,
        parameters=count.embedding_once,
        parameters_held=count.total,
        tokens=tokens,
        epochs=tokens / training_tokens if training_tokens else None,
        flops_per_token=flops,
        memory_bytes=_memory(config, count),
        gpu_hours=flops * tokens / (ASSUMED_MFU * peak) / 3600,
        run_bytes=_run_bytes(config, count.total),
        data_bytes=to_prepare and width * to_prepare,
        training_tokens=None if config.data.stream else train.get("tokens"),
        validation_tokens=data and {name: split["tokens"] for name, split in held_out.items()},
        validation_documents=data and {name: split["documents"] for name, split in held_out.items()},
        unigram_entropy=validation.get("unigram_entropy"),
        data_folder=str(data.folder) if data else None,
    )


def _run_bytes(config: TrainConfig, parameters: int) -> int:
    """Return the bytes of all checkpoints, including one that is being written, and of all exports."""
    trainer = config.trainer

    def written(every: int) -> int:
        return math.ceil(trainer.max_steps / every) if every else 1

    checkpoints = written(trainer.checkpoint_every)
    # Count the newest checkpoints, one per `keep_every` steps, and the next one.
    if trainer.keep_checkpoints:
        checkpoints = min(checkpoints, trainer.keep_checkpoints + written(trainer.keep_every))
    return parameters * (CHECKPOINT_BYTES * checkpoints + EXPORT_BYTES * written(trainer.export_every))


def _memory(config: TrainConfig, count: ParameterCount) -> int:
    """Return bytes per process. For models of other libraries, count weights, gradients and AdamW only."""
    callbacks = features_of(config) + make_callbacks(config.trainer.callbacks)
    features = sum(callback.memory(config) for callback in callbacks)
    if is_zoo(config.model):
        return 8 * count.total + 8 * count.total // config.launch.num_processes + features
    return training_memory(config).total + features


def plan_lines(plan: RunPlan) -> list[str]:
    """Describe the plan for the user, with warnings."""
    config = plan.config
    trainer, launch = config.trainer, config.launch
    peak = f"{launch.peak_tflops:g} TFLOP/s" if launch.peak_tflops else f"an {ASSUMED_GPU}'s peak"
    wall = f"{plan.gpu_hours / launch.num_processes:,.1f} hours on {launch.num_processes} GPU(s)"
    hours = f"GPU-hours    about {plan.gpu_hours:,.0f} = {wall} at {ASSUMED_MFU:.0%} of {peak}"
    disk = "" if plan.data_bytes is None else f"prepared tokens {plan.data_bytes / 1e9:,.2f} GB, "
    besides = ""
    if is_zoo(config.model):
        besides = ", besides what activations take"
    elif launch.device == "cuda":
        for size in GPU_SIZES:
            fits = plan.memory_bytes <= USABLE * size * 2**30
            besides += f"{', ' if besides else '; '}fits {size} GB: {'yes' if fits else 'no'}"
    most = "at most " if config.task is not None and config.task.curriculum else ""
    least = "at least " if plan.training_tokens is None else ""  # data.max_tokens is a limit
    return [
        f"parameters   {plan.parameters:,} with the embedding counted once, {plan.parameters_held:,} in all",
        f"tokens       {most}{plan.tokens:,} = {trainer.max_steps:,} steps x {trainer.global_batch_tokens:,}"
        + (f" ({least}{plan.epochs:.2f} epochs)" if plan.epochs else ""),
        f"batch        {launch.describe()} x {config.num_accumulated} micro-batch(es) x "
        f"{trainer.micro_batch_size} sequences x {trainer.seq_len} tokens",
        f"FLOPs        {plan.flops_per_token:.3g} per token, {plan.flops_per_token * plan.tokens:.3g} in all",
        *([hours] if plan.gpu_hours >= 1 else []),
        f"memory       about {plan.memory_bytes / 2**30:.2f} GiB per process{besides}",
        f"disk         {disk}run folder {plan.run_bytes / 1e9:,.2f} GB",
        f"schedule     {config.schedule.name}, peak {config.optimizer.lr:g}, "
        f"{config.schedule.warmup(trainer.max_steps)} warm-up steps",
        f"device       {launch.device}, {trainer.precision}",
        *_data_lines(plan),
    ]


def _data_lines(plan: RunPlan) -> list[str]:
    """Describe the splits of a text. Warn of a subset that is too small, and of short validation splits."""
    data, tokens, seq_len = plan.config.data, plan.validation_tokens, plan.config.trainer.seq_len
    if plan.config.task is not None:
        return []
    if tokens is None:
        lines = ["data         not prepared yet: fla-prepare does it, or the start of the run"]
        known, wanted = data.subset_tokens.get(str(data.name), math.inf), data.max_tokens or plan.tokens
        if wanted > MORE_TOKENS * known:
            amount = f"{known / 1e9:.0f}B of {wanted / 1e9:.0f}B tokens"
            lines.append(f"warning      data.name={data.name} has {amount}: choose a larger one")
        return lines
    training = "streamed" if plan.training_tokens is None else f"{plan.training_tokens:,} tokens"
    lines = [f"data         {data.source}: training {training}, validation {sum(tokens.values()):,}"]
    entropy = plan.unigram_entropy
    if entropy is not None:
        lines.append(f"baseline     loss {entropy:.4f} from token frequencies alone (unigram entropy)")
    return lines + [
        f"warning      the validation split{name and f' of {name}'} has {documents:,} documents, "
        f"{tokens[name] // seq_len:,} sequences: its loss is rough or missing (set data.validation_fraction)"
        for name, documents in plan.validation_documents.items()
        if documents < ENOUGH_DOCUMENTS or tokens[name] < ENOUGH_SEQUENCES * seq_len
    ]
