"""One program on one rank.

executor          programs on the ranks of one process, call after call; rank_threads: one thread per rank
calls             before a call runs: batches are read and agreed on, or refused
worker            the stages of one rank; instructions: the loop that runs its program
binders           each turns one action into the function that runs it
rank_state        values that a rank holds while it runs; batch: inputs and results of a step
stores            parameters, gradients and buffers
model_state       the stages and parameters of one process; memory_use: their memory
result_exchange   losses and outputs on the ranks that want them
overlap_times     when collectives and transfers ran; activation_mover: the interface of activation offload
"""
