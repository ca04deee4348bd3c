"""Output heads."""
