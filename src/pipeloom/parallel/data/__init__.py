"""Data parallelism: units of parameters, their shards, gathers and reductions (DDP, ZeRO, parameter server)."""
