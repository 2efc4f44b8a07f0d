"""Start one rank of a run: `fla_train.training.worker PLAN` (`module_command`), started by the agent.

Without arguments the process imports and waits for them (`import_ahead`). Ranks of torchrun or accelerate
arrive through `fla-train`. `rank.py`, which takes seconds to import, does the work.
"""

import os
import sys
from pathlib import Path

from fla_train.training.failures import report
from fla_train.training.preemption import StopRequest
from fla_train.utils.import_ahead import wait_for_arguments
from fla_train.utils.processes import die_with_parent, end_without_collecting, keep_freed_memory
from fla_train.utils.timeline import BEGAN, Timeline


def main() -> None:
    die_with_parent(int(os.environ["FLA_TRAIN_LAUNCHER"]))
    end_without_collecting()
    # Handle requests before the imports, which take seconds.
    request = StopRequest()
    sent = wait_for_arguments()
    timeline = Timeline(float(os.environ[BEGAN]))
    timeline.mark("launcher", at=sent)
    try:
        from fla_train.training.plan import read_plan
        from fla_train.training.rank import run
    except Exception as failure:
        sys.exit(report(failure))
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
