"""`fla-train`: compose the config, print the plan, train. `fla-train debug=smoke` tries it out."""

import sys

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from fla_train.cli.app import fail, run_hydra

INTERRUPTED = 130  # what a shell reports for a command ended by Ctrl-C


def train(node: DictConfig) -> int:
    """Train one composed config; in a sweep (`-m`) each job has a run folder of its own."""
    from fla_train.training.launch import TrainingFailed, launch
    from fla_train.training.preemption import EXIT_CODE, Preempted
    from fla_train.training.schema import to_config

    config = to_config(node)
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN and config.run.dir is not None:
        config.run.dir = f"{config.run.dir}/{hydra.job.num}"
    try:
        launch(config)
    except TrainingFailed as failure:
        return fail(failure, 1)
    except Preempted:
        fail("stopped on request; the same command with this run.dir goes on from where it was")
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        fail("interrupted; the same command with this run.dir goes on from the last checkpoint")
        sys.exit(INTERRUPTED)  # ends a sweep too
    return 0


def register() -> None:
    from fla_train.training.schema import register  # heavy, and not needed for --help

    register()


def main() -> None:
    """Console command."""
    run_hydra("train", register, train)


if __name__ == "__main__":
    main()
