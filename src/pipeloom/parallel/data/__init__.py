"""Data parallelism: DDP, ZeRO 1 to 3, parameter server.

buckets          which parameters form a unit, to be gathered and reduced together
unit             one unit; unit_layout: its flat memory; full_parameters: gathered and freed; unit_gradients: summed
unit_store       the units of one rank, behind UNSHARD, RESHARD and REDUCE_GRAD
layer_hooks      gathers and reduces between the layers of a computation
reductions       when the gradients of each unit are summed over replicas
replica_group    the collectives of each strategy
sharing          builds the store of a rank, and sums losses and samples over replicas
"""
