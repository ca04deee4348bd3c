"""Operators of mixtures of experts: sorting by expert, grouped products, balance."""
