"""Stages that run a model's own forward, with the parts of other stages passed over."""
