"""Binders: each turns one action into the function that runs it.

forward              F
backward             B, I and W
transfers            SEND and RECV, OFFLOAD and RELOAD
sequence_slices      what F, B and I of a slice of a sequence do in addition
"""
