"""Disk formats of quantized weights, one a file."""
