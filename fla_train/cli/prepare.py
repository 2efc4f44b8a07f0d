"""`fla-prepare`: tokenize a corpus once, for every run that will read it.

It takes the overrides of `fla-train`; the keys of `data` decide what is prepared:

    fla-prepare data=local data.path=corpus/ data.tokenizer.name=bpe data.tokenizer.vocab_size=32000
    fla-prepare experiment=paper/deltaproduct_340m
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from fla_train.cli.app import HydraJob, run_hydra
from fla_train.cli.base import with_base
from fla_train.data.config import make_paths_absolute
from fla_train.training import config
from fla_train.training.preemption import EXIT_CODE, Preempted, leaving_at_once


@dataclass
class PrepareConfig(config.TrainConfig):
    """Schema of configs/prepare.yaml."""

    verify: bool = False


def register() -> None:
    config.register(PrepareConfig)


def task(job: HydraJob) -> int:
    node = job.config
    try:
        with leaving_at_once():
            from fla_train.data.prepare import check_first_document, prepare

            run = node.run.dir
            if run and not (Path(run).expanduser() / "config.yaml").is_file():
                raise ValueError(f"run.dir={run} holds no run whose data could be prepared")
            if node.task is not None:
                raise ValueError("a synthetic task draws its sequences while it trains: nothing is prepared")
            make_paths_absolute(data := OmegaConf.to_object(node.data))
            check_first_document(data)
            prepared = prepare(data)
            if node.verify:
                prepared.verify()
    except Preempted as stop:
        print(stop)
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command resumes from here") from None
    for line in prepared.describe():
        print(f"data: {line}")
    checked = "every prepared shard is as written, " if node.verify else ""
    print(f"data: {checked}ready in {prepared.folder}")
    return 0


def main() -> None:
    run_hydra("prepare", register, task, with_base)


if __name__ == "__main__":
    main()
