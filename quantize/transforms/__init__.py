"""Transforms before rounding, one a file: the model computes the same function and rounds better."""
