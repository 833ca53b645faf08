"""Tensor parallelism: layers of a stage shared by several processes.

parallelize             cuts a model by a plan: `parallelize`
plan                    kinds of cuts, and the plans of transformers
layout                  the parallel form of each layer, one class per layout
one_d                   Megatron's layout, with sequence parallelism
decoders                decoders of transformers
grids                   layouts 2d, 2.5d and 3d, whose weights and activations are cut along several dimensions
unchanged               a model that cannot be cut stays as it was
cross_entropy           cross-entropy of logits whose vocabulary is cut
"""
