"""Train models: typed config, launcher, DeepSpeed engine, training loop, checkpoints, metrics."""
