"""Costs of a transformer on a cluster: seconds per kernel, stage and step, and bytes. No torch here."""
