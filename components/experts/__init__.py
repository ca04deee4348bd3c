"""Ways to run the experts that a router chose."""
