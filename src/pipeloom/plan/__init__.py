"""Decide how to run before anything runs: stages and their replicas, slices of the sequence, a cluster's times."""
