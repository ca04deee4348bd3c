"""Residual wirings."""
