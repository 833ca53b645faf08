"""The space of configurations: a tree whose nodes have lower bounds. No torch here.

    group     processes that share a stage, and the micro-batch size    work per device, warm-up of the fewest ranks
    mesh      + pipeline and data degree, micro-batches                 + warm-up and cool-down of single blocks, memory
    shape     + schedule, virtual stages, slices, order, blocks         `step_bound` without recomputation
    choice    + data strategy, recomputation, offload                   `step_bound`, data link, memory

Each level refuses configurations that cannot run or cannot fit, and counts them by reason.
"""
