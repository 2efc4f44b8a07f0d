"""lm-eval's own command line with our model type: `python -m fla_train.eval run --model fla_train ...`.

FLA_TRAIN_MIRROR=FOLDER names local copies of the tasks' data, as `fla-eval ... mirror=FOLDER` does.
"""

import os

from lm_eval.__main__ import cli_evaluate

import fla_train.eval.harness  # noqa: F401  registers the model type
from fla_train.eval.sets import local_datasets
from fla_train.utils.ranks import leave_other_launchers

if __name__ == "__main__":
    leave_other_launchers()  # accelerate would wait for the other machines of a batch job
    with local_datasets(os.environ.get("FLA_TRAIN_MIRROR")):
        cli_evaluate()
