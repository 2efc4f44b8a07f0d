"""Evaluation of checkpoints: lm-eval tasks, perplexity by context length, expressivity, reports.

Modules are imported by name (`fla_train.eval.harness`, ...): lm-eval and matplotlib load only where they are
used.
"""
