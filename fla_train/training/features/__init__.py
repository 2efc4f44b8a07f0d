"""Features of a training run, one file each, behind the protocol of `training.callback`.

`training.trainer.FEATURES` is their order.
"""
