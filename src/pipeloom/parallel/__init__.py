"""Meshes, data parallelism and less memory: what composes with a pipeline."""
