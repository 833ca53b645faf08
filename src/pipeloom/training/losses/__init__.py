"""Losses of a pipeline: what the model computes itself, and what is watched in a loss_fn.

own_loss         the loss that a model computes from labels among its arguments
traced_loss      the loss that a traced model returns
output_loss      the loss among the results of a model
labels           names, counts and weights of a model's labels; a number that notices when it is used
reductions       calls of losses of torch.nn.functional, means and divisions in a forward, of which a loss is made
element_means    over how many elements a loss is a mean, and whether that differs between micro-batches
sample_loops     terms of a loss that are of single samples
nonlinear        losses that are a root, a ratio or a product of numbers that samples make
term_rules       how calls in a forward show how losses of micro-batches combine
loss_rule        how a model's own loss combines over micro-batches
sample_halves    how a loss_fn follows from halves of a micro-batch's samples
stage_halves     how a model's own loss follows from halves of a micro-batch's samples
watched_mean     a loss of mean_over_labels that may be no such mean
watched_loss     a user's loss_fn that may be a mean of means
"""
