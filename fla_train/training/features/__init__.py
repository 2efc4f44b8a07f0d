"""Add features to a training run, one file each, behind the protocol of `training.callback`.

`build_features` in `training.trainer` sets their order. Files that declare keys do not import torch at the
top, because `--help` imports them. Their methods import the modules that need it.
"""
