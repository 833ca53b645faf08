"""What the ranks of a shape recompute and offload to fit into memory."""
