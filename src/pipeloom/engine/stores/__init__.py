"""The parameters, gradients and buffers that a rank holds.

parameter_store   main parameters and their gradients, and what data-parallel replicas share of them
parameter_range   which elements of a parameter a process updates
ownership         which rank holds which parameter and buffer
gradient_sum      sums of gradients of parameters that several ranks hold, and buffers that several ranks hold
"""
