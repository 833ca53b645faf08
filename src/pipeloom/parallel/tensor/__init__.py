"""Tensor parallelism: layers of a stage shared by several processes.

parallelize             cuts a model by a plan: `parallelize`
plan                    kinds of cuts, and the plans of transformers
layout                  the parallel form of each layer, one class per layout
one_d                   Megatron's layout, with sequence parallelism
decoders                decoders of transformers
summa, cubic            products of matrices in blocks on a grid of q x q or l x l x l processes
grid_shape              how tensors lie on a grid (2d, 2.5d, 3d), as arithmetic
grid, grid_layers       layers on a grid: linear, norms, embedding of tokens, loss
grid_norms              norms of activations whose features are cut
cross_entropy           cross-entropy of logits whose vocabulary is cut
"""
