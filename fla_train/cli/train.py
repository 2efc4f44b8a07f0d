"""`fla-train`: compose the config, print the plan, train. `fla-train debug=smoke` tries it out."""

from collections.abc import Sequence

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.app import INTERRUPTED, LeftOut, compose, fail, leave, run_hydra
from fla_train.cli.base import with_base


def train(node: DictConfig) -> int:
    """Train one composed config; in a sweep (`-m`) each job has a run folder of its own."""
    from fla_train.models.build import is_zoo
    from fla_train.models.zoo.baseline import ignored_overrides, new_name
    from fla_train.training.config import to_config
    from fla_train.training.launch import TrainingFailed, launch
    from fla_train.training.log import log
    from fla_train.training.preemption import EXIT_CODE, Preempted

    config = to_config(node)
    if node.baseline is not None:
        log(f"baseline     is an alias: write {new_name(node.baseline)}, and sizes as model.config.FIELD=...")
    if config.run.dir == "":  # `run.dir=$RUN` without RUN: a run that could never go on
        raise ValueError("run.dir is empty: give a folder, or null for a new one in runs/")
    hydra = HydraConfig.get()
    if hydra.mode == RunMode.MULTIRUN:
        if config.run.job is not None and config.run.dir is None:
            raise ValueError("give run.dir: a job that is queued again goes on from there")
        if config.run.job not in (None, hydra.job.num):
            raise LeftOut(f"this sweep has no job {config.run.job}: its jobs are 0 to {hydra.job.num}")
        if config.run.dir is not None:
            config.run.dir = f"{config.run.dir}/{hydra.job.num}"
    elif config.run.job is not None:
        raise ValueError(f"run.job={config.run.job} is a job of a sweep: add -m")
    if is_zoo(config.model) and (ignored := ignored_overrides(hydra.overrides.task)):
        raise ValueError(
            f"a {config.model['model_type']} model does not have {', '.join(ignored)}: write "
            "model.config.FIELD=... for the fields of its class"
        )
    if config.trainer.suite_every:
        check_suite(config.trainer.suite, config.trainer.suite_options)
    try:
        launch(config)
    except TrainingFailed as failure:
        return fail(failure, 2 if failure.final else 1)
    except Preempted:
        fail("stopped on request; the same command with this run.dir resumes from where it was")
        leave(EXIT_CODE)
    except KeyboardInterrupt:
        fail("interrupted; the same command with this run.dir resumes from the last checkpoint")
        leave(INTERRUPTED)
    return 0


def check_suite(suite: str, options: Sequence[str]) -> None:
    """Look at the request that will be made of `fla-eval` while training goes on.

    Raises:
        ValueError: it would be refused then.
    """
    from fla_train.cli.eval import register
    from fla_train.eval.config import validation_errors

    register()
    try:
        config = OmegaConf.to_object(compose("eval", [f"suite={suite}", *options]))
        if errors := validation_errors(config.suite):
            raise ValueError("\n  ".join(errors))
    except ValueError as error:
        raise ValueError(f"trainer.suite and trainer.suite_options: {error}") from error


def register() -> None:
    from fla_train.training.config import register  # heavy, and not needed for --help

    register()


def main() -> None:
    """Console command."""
    run_hydra("train", register, train, with_base)


if __name__ == "__main__":
    main()
