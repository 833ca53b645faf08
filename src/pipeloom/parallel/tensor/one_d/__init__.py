"""Megatron's layout: layers cut along one dimension, and tokens between layers.

layers                  the parallel form of each layer
cutting                 parameters as blocks
linear                  column and row layers
vocabulary, logits      embeddings and logits in parts of the vocabulary
tokens                  sequence parallelism: tokens between layers are gathered and scattered
traffic                 bytes that processes send, in closed form
"""
