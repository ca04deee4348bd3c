"""Rotary frequencies beyond the trained context."""
