"""Losses of a pipeline: what the model computes itself, and what is watched in a loss_fn.

own_loss         the loss that a model computes from labels among its arguments
traced_loss      the loss that a traced model returns
output_loss      the loss among the results of a model
reductions       calls of losses of torch.nn.functional in a forward, and which of them a loss is made of
loss_rule        how a model's own loss combines over micro-batches
noticed_number   a number that notices when it is used
watched_loss     a user's loss_fn that may be a mean of means
"""
