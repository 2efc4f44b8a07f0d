"""The trainer: typed config, launcher, DeepSpeed engine, loop, checkpoints, metrics."""
