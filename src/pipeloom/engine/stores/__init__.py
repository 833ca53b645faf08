"""The parameters, gradients and buffers that a rank holds."""
