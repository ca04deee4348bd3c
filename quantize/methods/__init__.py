"""Quantization methods, one a file: pure functions of a weight and its input statistics."""
