"""Optimizers that torch does not have, or not for parameters that processes share."""
