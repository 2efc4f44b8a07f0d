"""Gluon kernels of the operator for Hopper GPUs (sm_90)."""
