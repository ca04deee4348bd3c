"""Measurements of a model: accuracy, perplexity, speed, memory, and reports that compare them."""
