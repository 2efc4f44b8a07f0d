"""Add features to a training run, one file each, behind the protocol of `training.callback`.

`build_features` in `training.trainer` sets their order.
"""
