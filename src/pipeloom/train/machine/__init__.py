"""Measures this machine for `pipeloom.plan.local`, and the layers of a model; and torch.compile's directory on it."""
