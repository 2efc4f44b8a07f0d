"""lm-eval's own command line with our model type: `python -m fla_train.eval run --model fla_train ...`."""

from lm_eval.__main__ import cli_evaluate

import fla_train.eval.harness  # noqa: F401  registers the model type

if __name__ == "__main__":
    cli_evaluate()
