"""Routers: how tokens and experts choose each other."""
