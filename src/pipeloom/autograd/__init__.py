"""The two halves of a backward (I and W) of any module, activation recomputation, and what autograd saves.

split_backward       runs I, and keeps what W needs
deferred_gradients   which weight gradients of a graph W computes, and their formulas by type of autograd node
recomputation        forwards that save less: checkpointed blocks or attention
saved_bytes          counts the bytes that autograd saves
"""
