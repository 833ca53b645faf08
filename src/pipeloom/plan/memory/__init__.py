"""How much memory every rank takes, before anything runs; and the cheapest way to stay under a cap. No torch here."""

from pipeloom.plan.memory.choose import Choice, choose_memory
from pipeloom.plan.memory.layer_memory import Layer, gpt_layers, in_stages, num_parameters
from pipeloom.plan.memory.memory_file import MemoryRow, read_memory, write_memory
from pipeloom.plan.memory.rank_memory import KINDS, Model, RankMemory, memory_of_rank, memory_of_ranks
from pipeloom.plan.memory.state_bytes import OPTIMIZERS

__all__ = [
    "KINDS",
    "OPTIMIZERS",
    "Choice",
    "Layer",
    "MemoryRow",
    "Model",
    "RankMemory",
    "choose_memory",
    "gpt_layers",
    "in_stages",
    "memory_of_rank",
    "memory_of_ranks",
    "num_parameters",
    "read_memory",
    "write_memory",
]
