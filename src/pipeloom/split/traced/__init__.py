"""Stages of any model that torch.export can trace.

inputs     binds batches to the arguments of the model, and checks that the trace holds for them
export     traces the model in training and in evaluation mode
segments   the places where the graph may be cut
timing     measures what is between them
cutting    which operations, tensors and messages each stage has
stage      `TracedStage`, which runs a part of the graph; bound: quicker functions for its operations
"""
