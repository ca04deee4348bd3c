"""Positions added to embeddings."""
