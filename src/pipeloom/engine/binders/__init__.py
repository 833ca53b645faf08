"""Binders: each turns one action into the function that runs it.

computations      F, B, I and W
transfers         SEND and RECV, OFFLOAD and RELOAD
skips             what F, B and I do in addition where values skip stages
action_graphs     records F, B, I and W as CUDA graphs, and replays them
sequence_slices   what F, B and I do in addition where sequences are sliced
"""
