"""The optimizer step without a barrier (Zero Bubble, arXiv:2401.10241, section 4)."""
