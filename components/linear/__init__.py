"""How a weight matrix is stored and multiplied."""
