"""Triton kernels of the operator: chunk, fused recurrent, sequence split."""
