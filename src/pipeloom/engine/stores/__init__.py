"""The parameters, gradients and buffers that a rank holds.

parameter_store   the parameters of a rank; held_bytes counts their bytes
sharing           how data-parallel replicas share them; blocks: how the processes inside a stage do
ownership         which ranks hold which parameters and buffers; parameter_range: which elements
gradient_sum      sums gradients of parameters that several ranks hold
shared_buffers    makes buffers that several ranks hold equal
"""
