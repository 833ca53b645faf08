"""Best-first search: open nodes, their expansion, candidates, and the best plans so far."""
