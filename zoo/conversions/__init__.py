"""Conversions, one file each: START_to_END."""
