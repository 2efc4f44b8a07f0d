"""Hydra configuration files, which `pkg://fla_train.configs` finds, and how a saved one is read (`saved`)."""
