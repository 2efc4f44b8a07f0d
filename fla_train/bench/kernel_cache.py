"""`fla-bench precompile`: fill a folder with the compiled kernels of a training run, for containers to bring.

A run of two steps on made-up text compiles what the run will: the check of the operator, steps with and
without statistics, validation, and the check of the export.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.models import DeltaProductConfig
from fla_train.training.config import AUTO, LoggerConfig, RunConfig, TrainConfig, WandbConfig
from fla_train.training.launch import TrainingFailed, launch
from fla_train.utils.scratch import scratch_folder

DOCUMENTS = 40
STEPS = 2


def precompile_run(config: TrainConfig, folder: Path) -> int:
    """Compile the kernels of a run into `folder`, Triton's cache of this process from here on.

    Kernels depend on model, precision, `trainer.seq_len` and `trainer.micro_batch_size`, and neither on data,
    steps nor, but for context parallel ranks, the number of processes.

    Returns:
        How many compiled kernels the folder holds now.

    Raises:
        ValueError: a config that `fla-train` refuses, or the run has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder.resolve())
    with scratch_folder("fla-train-precompile-") as scratch:
        try:
            launch(_short(config, scratch))
        except TrainingFailed as failure:
            raise ValueError(f"the run that compiles has failed: {failure}") from None
    return len(list(folder.rglob("*.cubin")))


def _short(config: TrainConfig, scratch: Path) -> TrainConfig:
    """`config` for a few steps on one machine that leave nothing outside of `scratch`."""
    trainer = replace(
        config.trainer,
        max_steps=STEPS,
        global_batch_tokens=AUTO,  # one micro-batch a rank
        target_batch_tokens=1,
        eval_tokens=config.trainer.micro_batch_size * config.trainer.seq_len,
        stats_every=STEPS,
        profile_steps=[],
        eval_every=0,
        checkpoint_every=0,
        export_every=0,
        suite_every=0,
    )
    parallel = config.launch.context_parallel
    return replace(
        config,
        trainer=trainer,
        launch=replace(config.launch, num_processes=parallel, num_machines=1, machine_rank=None),
        logger=LoggerConfig(wandb=WandbConfig(mode="disabled", project=""), tensorboard=False),
        hub=replace(config.hub, repo_id=None, push_every=0),
        run=RunConfig(dir=str(scratch / "run")),
        init_from=None,
        **({} if config.task is not None else _made_up_text(config, scratch)),
    )


def _made_up_text(config: TrainConfig, scratch: Path) -> dict[str, object]:
    """`data` and `model` for text that is in `scratch`, with the vocabulary of `config` or the usual one."""
    text = "one two three " * (config.trainer.seq_len // 10)
    lines = (json.dumps({"text": f"{number} {text}"}) for number in range(DOCUMENTS))
    (scratch / "text.jsonl").write_text("\n".join(lines) + "\n")
    data = DataConfig(
        source="local",
        path=str(scratch / "text.jsonl"),
        tokenizer=TokenizerConfig(name="bytes"),
        validation_fraction=0.5,
        document_boundaries=config.data.document_boundaries,
        contiguous=config.data.contiguous,
        cache_dir=str(scratch / "data"),
    )
    vocabulary = config.model["vocab_size"] or DeltaProductConfig.vocab_size
    return {"data": data, "model": config.model | {"vocab_size": vocabulary}}
