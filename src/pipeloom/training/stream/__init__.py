"""Asynchronous training: parameters change while micro-batches are in flight (PipeDream and its family).

stream              `Stream`, the public class
rank_run            one rank's part in a run
batches             micro-batches of the user's batches
weight_versions     the versions of a stage's parameters
stage_updates       optimizer steps of single stages
update_options      clipping and learning rates
replica_gradients   sums of gradients over the replicas of a stage
results             losses and gradient norms of a run
"""
