"""Provide the Python API, which `import fla_train` offers: compose a config, build data and model, train.

    config = fla_train.compose("debug=smoke", "trainer.max_steps=20")
    run = fla_train.train(config)

`fla-train` also calls `train`, so that a notebook behaves like the command (docs/python.md).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from omegaconf import OmegaConf

from fla_train.cli import app
from fla_train.cli.base import with_base
from fla_train.cli.eval import register as register_eval
from fla_train.cli.overrides import quote_values
from fla_train.data.mixture import Dataset
from fla_train.data.sampler import PackedDataset
from fla_train.eval.config import SuiteConfig
from fla_train.run.launch import launch
from fla_train.run.resolve import resolve
from fla_train.run.results import Run
from fla_train.training.config import TrainConfig, register, to_config
from fla_train.training.run_data import TaskSequences, open_training_data
from fla_train.utils.keys import find_errors, require_none, require_valid
from fla_train.utils.overrides import as_data, assign

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PreTrainedModel


def compose(*overrides: str, config_dir: str | None = None) -> TrainConfig:
    """Return the config that `fla-train OVERRIDES...` would train. Its fields may be changed.

    Args:
        overrides: overrides as on the command line: `"model=delta_net/tiny"`, `"optimizer.lr=1e-3"`.
        config_dir: a folder of further options, as with `--config-dir`.

    Raises:
        ValueError: names every override that does not fit.
    """
    if other := [text for text in overrides if not isinstance(text, str)]:
        raise ValueError(f"overrides are strings, compose('a=1', 'b=2'): got {other[0]!r}")
    register()
    words = with_base(quote_values("train", overrides), config_dir=config_dir)
    return to_config(app.compose("train", words, config_dir=config_dir), words)


def train(config: TrainConfig) -> Run | None:
    """Train `config` to its end in separate processes, as `fla-train` does. An existing run resumes.

    Call it in the main thread. Ctrl-C makes the workers save a checkpoint and end; a second Ctrl-C kills
    them.

    Returns:
        The finished run; None for a `dry_run`.

    Raises:
        ValueError: the config, the data or the run folder has an error; nothing was started.
        TrainingFailed: workers failed; the message is the line that `fla-train` prints.
        Preempted: a signal or Ctrl-C arrived, and a checkpoint has been saved.
        KeyboardInterrupt: Ctrl-C arrived while no workers ran, or a second time.
    """
    if config.trainer.suite_every:
        try:
            check_suite(config.trainer.suite, config.trainer.suite_options)
        except ValueError as error:
            require_none([*find_errors(config), str(error)])
    folder = launch(config)
    return None if folder is None else Run(folder.root)


def build_data(config: TrainConfig) -> Dataset | PackedDataset | TaskSequences:
    """Return the training sequences of `config`, after tokenizing its text if necessary.

    `.sequences(indices)` returns the sequences with int64 numbers [n], in the order of training: token ids
    [n, trainer.seq_len], inputs and labels [2, n, T] of a task, or a packed `Batch` with document bounds.

    Raises:
        ValueError: the config or the data can't be used.
    """
    plan = resolve(config, data="prepare")
    return open_training_data(plan.config, plan.open_data())


def build_model(config: TrainConfig) -> "PreTrainedModel":
    """Build the model from which training `config` starts, in fp32 on the CPU.

    Its weights depend on `seed`, or come from `init_from`.

    Raises:
        ValueError: the config, its data (which decide the vocabulary) or the weights can't be used.
    """
    from fla_train.training.model import build_model  # imports the models: seconds

    plan = resolve(config, data="prepare")
    return build_model(plan.config, plan.open_data())


def check_suite(
    suite: str, options: Sequence[str], keys: str = "trainer.suite and trainer.suite_options"
) -> SuiteConfig:
    """Return the suite of a `fla-eval` request, which evaluates a language model during or after training.

    Args:
        keys: what errors call the request.

    Raises:
        ValueError: `fla-eval` would reject it.
    """
    register_eval()
    try:
        words = quote_values("eval", [assign("suite", suite), *as_data(options)])
        config = OmegaConf.to_object(app.compose("eval", words))
        require_valid(config.suite, "suite.")
        if config.suite.expressivity is not None:
            raise ValueError(f"suite={suite} is for models of a synthetic task, this one is trained on text")
    except ValueError as error:
        raise ValueError(f"{keys}: {error}") from error
    return config.suite
