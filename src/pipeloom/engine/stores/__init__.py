"""What a rank holds of a model: parameters, gradients and buffers, and who else holds them."""
