"""`fla-eval`: evaluate a checkpoint, print the table and say where the files are.

fla-eval checkpoint=runs/my-run
fla-eval checkpoint=runs/my-run suite=tasks suite.tasks=[lambada_openai,piqa]
"""

import logging

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.app import fail, run_hydra
from fla_train.eval.config import EvalConfig


def register() -> None:
    ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def task(config: DictConfig) -> int:
    from fla_train.eval.run import evaluate  # heavy, and not needed for --help or a faulty override

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every loaded model it is given
    folder, record = evaluate(OmegaConf.to_object(config))
    print((folder / "table.md").read_text())
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        print(file)
    failed = [name for name, result in record["tasks"].items() if "error" in result]
    if failed:
        return fail(
            f"could not run {', '.join(failed)}; run again with output={folder} to try only these", code=1
        )
    return 0


def main() -> None:
    run_hydra("eval", register, task)


if __name__ == "__main__":
    main()
