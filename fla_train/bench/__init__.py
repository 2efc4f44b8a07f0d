"""Measurements on this machine: the operator's backends and their peers, and the training step."""
