"""Visibility patterns."""
