"""Attention projections."""
