"""Hydra configuration files; `pkg://fla_train.configs` finds them. No code lives here."""
