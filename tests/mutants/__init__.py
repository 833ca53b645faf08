"""Mutation testing: does the suite notice a changed operator? See `python -m tests.mutants --help`."""
