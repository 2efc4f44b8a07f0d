"""`fla-eval`: evaluate a checkpoint and print the table and the names of the files; or compare evaluations.

fla-eval checkpoint=runs/my-run
fla-eval checkpoint=runs/my-run suite=tasks suite.tasks=[lambada_openai,piqa]
fla-eval compare runs/a runs/b evaluations/c [--output DIR]
torchrun --nproc-per-node 4 -m fla_train.cli.eval checkpoint=runs/my-run suite=paper
"""

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fla_train.cli.app import INTERRUPTED, HydraJob, fail, plain_errors, run_hydra
from fla_train.eval.config import EvalConfig
from fla_train.utils.processes import keep_freed_memory


def register() -> None:
    ConfigStore.instance().store(name="eval_schema", node=EvalConfig)


def task(job: HydraJob) -> int:
    """Run the evaluation, print its table, and return the exit status."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "60")  # a log gets a line of a progress bar a minute
    # Imported here, because --help and invalid overrides need none of it.
    from fla_train.eval.parallel import OtherRankFailed, launched_ranks
    from fla_train.eval.run import evaluate
    from fla_train.utils.device import pick_device

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every loaded model it is given
    options: EvalConfig = OmegaConf.to_object(job.config)
    if pick_device(options.device) == "cpu":
        keep_freed_memory()
    with launched_ranks() as ranks:
        try:
            folder, result = evaluate(options, ranks=ranks)
        except ValueError:
            if ranks.rank:  # rank 0 reports it
                return 2
            raise
        except KeyboardInterrupt as stop:
            if ranks.rank:
                return INTERRUPTED
            kept = (f"finished sets and tasks are kept: repeat with output={folder}" for folder in stop.args)
            raise KeyboardInterrupt(*kept) from None
        except OtherRankFailed as failure:
            return 1 if ranks.rank else fail(f"the evaluation stopped: {failure}", code=1)
    if ranks.rank:
        return 0
    _show(folder)
    if result.errors:
        names = ", ".join(result.errors)
        advice = f"add output={folder} to try again, or leave them out of the suite"
        return fail(f"could not run {names}; {advice}", code=1)
    return 0


def compare(arguments: Sequence[str]) -> None:
    """Write tables and figures of several evaluations."""
    parser = ArgumentParser("fla-eval compare", description=compare.__doc__)
    about = "folder that fla-eval wrote, or a run folder (its newest evaluation); the first is the reference"
    parser.add_argument("places", nargs="+", metavar="PLACE", help=about)
    default = Path(f"comparisons/{datetime.now():%Y%m%d-%H%M%S}")
    about = "folder of the tables and figures (default: comparisons/TIME)"
    parser.add_argument("--output", type=Path, metavar="DIR", default=default, help=about)
    request = parser.parse_args(arguments)
    from fla_train.eval.run import write_comparison

    write_comparison(request.output, request.places)
    _show(request.output)


def _show(folder: Path) -> None:
    print((folder / "table.md").read_text())
    for file in sorted(path for path in folder.glob("[!.]*") if path.is_file()):
        print(file)


@plain_errors()
def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        compare(sys.argv[2:])
    else:
        run_hydra("eval", register, task)


if __name__ == "__main__":
    main()
