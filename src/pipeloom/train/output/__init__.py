"""The output directory of a run, and its display on the terminal."""
