"""Reads text files, tokenizes them, and samples batches."""
