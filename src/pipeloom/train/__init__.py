"""The trainer of `pipeloom train`: configuration, data, output, checkpoints, and the loop."""
