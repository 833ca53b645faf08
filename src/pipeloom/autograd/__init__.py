"""The two halves of a backward (I and W) of any module, activation recomputation, and what autograd saves."""
