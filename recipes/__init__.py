"""Recipes: YAML files that quantize, train and evaluate models, and the runner that executes them."""
