"""Caches of past tokens."""
