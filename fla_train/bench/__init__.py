"""Benchmarks behind `fla-bench`: operator, fused ops, decoding, training steps."""
