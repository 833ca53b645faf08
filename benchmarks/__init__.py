"""One folder per claim. Run one with ``python -m benchmarks.CLAIM`` from the root of the repository."""
