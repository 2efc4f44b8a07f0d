"""Add features to a training run, one file each, behind the protocol of `training.callback`.

`build_features` in `training.trainer` sets their order. A file that declares keys imports no torch, because
commands read it before they answer. What it computes with torch is in a module that `attach` imports.
"""
