"""Checkpoint families, one file each."""
