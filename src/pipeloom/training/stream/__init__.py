"""Asynchronous training: parameters change while micro-batches are in flight (PipeDream and its family)."""
