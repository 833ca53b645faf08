"""Binders: each turns one action into the function that runs it."""
