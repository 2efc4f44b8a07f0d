"""`fla-prepare`: tokenize a corpus once, for every run that will read it.

fla-prepare data=local data.path=corpus/ data.tokenizer.name=bpe data.tokenizer.vocab_size=32000
"""

import sys
from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.app import INTERRUPTED, fail, run_hydra
from fla_train.data.config import DataConfig
from fla_train.training.preemption import EXIT_CODE, Preempted, leaving_at_once


@dataclass
class PrepareConfig:
    """Schema of configs/prepare.yaml."""

    data: DataConfig = field(default_factory=DataConfig)
    verify: bool = False


def register() -> None:
    ConfigStore.instance().store(name="prepare_schema", node=PrepareConfig)


def task(config: DictConfig) -> int:
    try:
        with leaving_at_once():
            from fla_train.data.preparation import prepare  # heavy, and not needed for --help

            settings: PrepareConfig = OmegaConf.to_object(config)
            prepared = prepare(settings.data)
            if settings.verify:
                prepared.verify()
    except Preempted:
        fail("stopped on request; the same command goes on from here")
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        fail("interrupted; the same command goes on from here")
        sys.exit(INTERRUPTED)
    for line in prepared.describe():
        print(f"data: {line}")
    print(f"data: {'every shard is as written, ' if settings.verify else ''}ready in {prepared.folder}")
    return 0


def main() -> None:
    run_hydra("prepare", register, task)


if __name__ == "__main__":
    main()
