"""`fla-bench precompile`: fill a folder with the compiled kernels of a training run, for containers.

A run of two steps on a little text compiles the same kernels as the real run: those of the operator's check,
of steps with and without statistics, of validation, and of the export's check.
"""

import os
import time
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fla_train.bench.models import Compose
from fla_train.bench.report import Report
from fla_train.data.config import DataConfig, TokenizerConfig
from fla_train.models.configuration import DeltaProductConfig
from fla_train.run.launch import TrainingFailed, launch
from fla_train.training.config import TrainConfig

# Two steps of one micro-batch per rank, with statistics in the second.
SHORT = """
trainer.max_steps=2 trainer.max_tokens=null trainer.epochs=null schedule.warmup_steps=null
schedule.decay_steps=null trainer.stats_every=2 trainer.global_batch_tokens=auto trainer.target_batch_tokens=1
trainer.profile_steps=[] trainer.eval_every=0 trainer.checkpoint_every=0 trainer.export_every=0
trainer.suite_every=0 launch.num_machines=1 launch.machine_rank=null logger.wandb.mode=disabled
logger.tensorboard=false hub.repo_id=null hub.push_every=0 init_from=null
""".split()


def run(options: Namespace, report: Report, compose: Compose) -> None:
    """Compile the kernels of a run into the folder, which becomes Triton's cache of this process.

    Kernels depend on model, precision, `trainer.seq_len`, `trainer.micro_batch_size`, context parallelism,
    `data.document_boundaries` and `data.contiguous`. They depend neither on other settings of the data nor on
    the number of steps or of data-parallel processes.

    Raises:
        ValueError: there is no GPU, `fla-train` rejects the config, or the run failed.
    """
    if not torch.cuda.is_available():
        raise ValueError("precompile needs a GPU of the kind that will train: kernels are compiled for it")
    start, folder = time.monotonic(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    with TemporaryDirectory(prefix="fla-train-precompile-") as scratch:
        config = compose([*options.overrides, *_short(compose(options.overrides), Path(scratch))])
        if config.task is None:
            config.data = _short_text(config, Path(scratch))
        try:
            launch(config)
        except TrainingFailed as failure:
            raise ValueError(f"the run that compiles has failed: {failure}") from None
    kernels = len(list(folder.rglob("*.cubin")))
    report.print(f"{kernels} kernels in {folder}, after {time.monotonic() - start:.0f} s")
    report.print(f"In a container, with this folder at the same path: TRITON_CACHE_DIR={folder}")


def _short(config: TrainConfig, scratch: Path) -> list[str]:
    """Return overrides for a few steps of the run on one machine that write to `scratch` only."""
    eval_tokens = config.trainer.micro_batch_size * config.trainer.seq_len
    short = [*SHORT, f"run.dir={scratch / 'run'}", f"trainer.eval_tokens={eval_tokens}"]
    short.append(f"launch.num_processes={config.launch.context_parallel}")
    if config.task is None:
        short.append(f"model.vocab_size={config.model['vocab_size'] or DeltaProductConfig.vocab_size}")
    return short


def _short_text(config: TrainConfig, scratch: Path) -> DataConfig:
    """Return settings that read Python's standard library in rows like those of the run."""
    return DataConfig(
        source="stdlib",
        max_tokens=max(1 << 20, 64 * config.trainer.seq_len),
        cache_dir=str(scratch / "data"),
        validation_fraction=0.5,
        document_boundaries=config.data.document_boundaries,
        contiguous=config.data.contiguous,
        tokenizer=TokenizerConfig(name="bytes"),
    )
