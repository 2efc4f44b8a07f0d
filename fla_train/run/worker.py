"""Start one rank of a run: `fla_train.run.worker PLAN` (`module_command`), started by the agent.

Without arguments the process imports and waits for them (`import_ahead`). Ranks of torchrun or accelerate
arrive through `fla-train`. `rank.py`, which takes seconds to import, does the work. Stdout and stderr go to
train.log on rank 0 and to logs/rank-N.log on others; rank 0 keeps the terminal for progress. A failure, also
of an import, is written to the file in TORCHELASTIC_ERROR_FILE, which torch's agents read.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fla_train.run.import_ahead import wait_for_arguments
from fla_train.training.failures import report
from fla_train.training.log import redirect_output
from fla_train.training.preemption import EXIT_CODE, StopRequest
from fla_train.training.run_folder import RunFolder
from fla_train.utils.processes import die_with_parent, end_without_collecting, keep_freed_memory
from fla_train.utils.timeline import BEGAN, Timeline

if TYPE_CHECKING:  # it imports torch, and a request to stop must be handled before that
    from fla_train.training.plan import RunPlan


def run(plan: "RunPlan", request: StopRequest, timeline: Timeline) -> NoReturn:
    """Run `rank.train` with this process's output in the rank's log, then end the process."""
    try:
        console = redirect_output(RunFolder(Path(plan.config.run.dir)).log(int(os.environ["RANK"])))
    except OSError as failure:
        os._exit(report(failure, has_log=False))
    try:
        from fla_train.run.rank import train

        finished = train(plan, console, request, timeline)
    except BaseException as failure:
        # Do not wait for communication threads, which wait for the other ranks.
        os._exit(report(failure, plan.config))
    with suppress(OSError):
        console.flush()
    import torch.distributed as dist

    dist.destroy_process_group()
    sys.exit(0 if finished else EXIT_CODE)


def main() -> None:
    die_with_parent(int(os.environ["FLA_TRAIN_LAUNCHER"]))
    end_without_collecting()
    # Handle requests before the imports, which take seconds.
    request = StopRequest()
    sent = wait_for_arguments()
    timeline = Timeline(float(os.environ[BEGAN]))
    timeline.mark("launcher", at=sent)
    from fla_train.training.plan import read_plan

    try:
        plan = read_plan(Path(sys.argv[1]))
    except (OSError, ValueError) as failure:
        # The agent's temporary files have been deleted, so another start would fail, too.
        sys.exit(report(ValueError(str(failure)), has_log=False))
    if plan.config.launch.device == "cpu":
        keep_freed_memory()
    run(plan, request, timeline)


if __name__ == "__main__":
    main()
