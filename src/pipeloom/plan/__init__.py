"""Decide how to run before anything runs: slices of the sequence, and what a cluster would take."""
