"""Recovery of `pipeloom train` from the loss of a rank: copies of the state in memory, and where ranks go on."""
