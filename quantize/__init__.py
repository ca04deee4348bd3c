"""Quantization: methods, statistics, disk formats and the runner that applies them to a model."""
