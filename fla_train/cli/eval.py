"""`fla-eval`: evaluate a checkpoint, print the table and say where the files are; or compare evaluations.

fla-eval checkpoint=runs/my-run
fla-eval checkpoint=runs/my-run suite=tasks suite.tasks=[lambada_openai,piqa]
fla-eval compare runs/a runs/b evaluations/c [output=DIR]
torchrun --nproc-per-node 4 -m fla_train.cli.eval checkpoint=runs/my-run suite=paper
"""

import logging
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from fla_train.cli.app import INTERRUPTED, fail, fail_by, run_hydra
from fla_train.eval.config import EvalConfig

COMPARE_USAGE = """\
usage: fla-eval compare PLACE PLACE... [output=DIR]

  PLACE   folder that fla-eval wrote, or a run folder (its newest evaluation); the first is the reference
  output  folder of the tables, figures and page; default: comparisons/<time>
"""


def register() -> None:
    ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def task(config: DictConfig) -> int:
    from fla_train.eval.parallel import OtherRankFailed, launched_ranks
    from fla_train.eval.run import evaluate  # heavy, and not needed for --help or an invalid override
    from fla_train.utils.device import pick_device
    from fla_train.utils.processes import keep_freed_memory

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every loaded model it is given
    options: EvalConfig = OmegaConf.to_object(config)
    if pick_device(options.device) == "cpu":
        keep_freed_memory()
    if options.suite.expressivity is not None:
        from fla_train.eval.expressivity import evaluate_expressivity

        _show(evaluate_expressivity(options)[0])
        return 0
    with launched_ranks() as ranks:
        try:
            folder, record = evaluate(options, ranks=ranks)
        except ValueError:
            if ranks.rank:  # rank 0 has it too, and the console
                return 2
            raise
        except KeyboardInterrupt as stop:
            if not ranks.rank:
                kept = [f"finished parts are kept: add output={folder} to go on" for folder in stop.args]
                fail("; ".join(["interrupted", *kept]))
            sys.exit(INTERRUPTED)
        except OtherRankFailed as failure:
            return 1 if ranks.rank else fail(f"the evaluation stopped: {failure}", code=1)
    if ranks.rank:
        return 0
    _show(folder)
    return exit_status(folder, record)


def exit_status(folder: Path, record: dict) -> int:
    """Print what was not evaluated; 1 if it failed, 0 if its data are not here but others were evaluated."""
    keys = {"perplexity": "suite.perplexity.sets", "needle": "suite.needle.tasks", "tasks": "suite.tasks"}
    results = {name: result for part in keys for name, result in record[part].items()}
    lost = {name: result.get("missing") for name, result in results.items() if "error" in result}
    if len(lost) == len(results) or not all(lost.values()):
        failed = ", ".join(name for name, missing in lost.items() if not missing) or ", ".join(lost)
        return fail(f"could not run {failed}; run again with output={folder} to try only these", code=1)
    if lost:
        kept = {key: [name for name in record[part] if name not in lost] for part, key in keys.items()}
        select = " ".join(f"{key}=[{','.join(names)}]" for key, names in kept.items() if names)
        count = f"{len(results) - len(lost)} of {len(results)} evaluated"
        print(f"{count} (missing: {', '.join(lost)}; {select} selects the others)", file=sys.stderr)
    return 0


def compare(arguments: Sequence[str]) -> int:
    """`fla-eval compare`: tables, figures and a page of several evaluations; the exit code."""
    places = [argument for argument in arguments if not argument.startswith(("output=", "-"))]
    outputs = [argument.removeprefix("output=") for argument in arguments if argument.startswith("output=")]
    flags = [argument for argument in arguments if argument.startswith("-")]
    if flags:
        print(COMPARE_USAGE, end="")
        return 0 if set(flags) <= {"-h", "--help"} else 2
    from fla_train.eval.report import write_comparison

    folder = Path(outputs[-1] if outputs else f"comparisons/{datetime.now():%Y%m%d-%H%M%S}").expanduser()
    try:
        write_comparison(folder, places)
    except (ValueError, OSError) as error:
        if os.environ.get("FLA_TRAIN_TRACEBACK"):
            raise
        return fail_by(error)
    _show(folder)
    return 0


def _show(folder: Path) -> None:
    print((folder / "table.md").read_text())
    for file in sorted(path for path in folder.glob("[!.]*") if path.is_file()):
        print(file)


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        sys.exit(compare(sys.argv[2:]))
    run_hydra("eval", register, task)


if __name__ == "__main__":
    main()
