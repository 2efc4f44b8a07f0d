"""lm-eval's own command line with our model type: `python -m fla_train.eval run --model fla_train ...`.

FLA_TRAIN_MIRROR=FOLDER names a mirror of the tasks' data, as `fla-eval ... mirror=FOLDER` does.
"""

import os
import sys
from contextlib import nullcontext

from lm_eval.__main__ import cli_evaluate

import fla_train.eval.harness  # noqa: F401  registers the model type
from fla_train.eval.mirror import hub_datasets, mirror_folder
from fla_train.utils.ranks import leave_other_launchers


def main() -> None:
    leave_other_launchers()  # accelerate would wait for the other machines of a batch job
    try:
        mirror = mirror_folder(os.environ.get("FLA_TRAIN_MIRROR"))
    except ValueError as error:
        sys.exit(f"error: FLA_TRAIN_MIRROR: {error}")
    with hub_datasets(mirror) if mirror else nullcontext():
        cli_evaluate()


if __name__ == "__main__":
    main()
