"""Evaluation: the lm-eval bridge, perplexity against context length, reports.

Modules are imported by name (`fla_train.eval.harness`, ...): lm-eval and matplotlib load only where they are
used.
"""
