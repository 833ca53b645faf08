"""Before a call runs: ranks read their batches, and agree on them or refuse the call.

intake       all of it, as the executor asks for it
reader       cuts the batch of one process into micro-batches and validates them
agreement    sizes and forms of the batches of all ranks
equal_seeds  random numbers of ranks that share layers
refusals     calls that no rank runs because the batch of one is invalid
"""
