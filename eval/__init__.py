"""Evaluation of checkpoints: lm-eval tasks, perplexity by context length, needles, expressivity, comparisons.

- `run` evaluates a checkpoint: `perplexity_sweep`, `needle`, `harness` and `expressivity` make jobs from a
  `session`, and `result_cache` runs them.
- `result` is the typed result, which `compare`, `tables` and `figures` read.
- `perplexity` and `likelihood` compute losses, `documents` and `sets` read text, `intervals` are statistics.
"""
