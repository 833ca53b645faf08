"""Autograd: the two halves of a backward (I and W), recomputation, and what a graph keeps."""
