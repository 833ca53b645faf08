"""Memory forecasts: the peak memory of every rank before anything runs, and the fastest run under a cap. No torch."""

from pipeloom.plan.memory.choose import Choice, choose_memory
from pipeloom.plan.memory.memory_file import MemoryRow, read_memory, write_memory
from pipeloom.plan.memory.memory_model import LayerMemory, MemoryModel, in_stages, num_parameters
from pipeloom.plan.memory.optimizer_table import STATES, OptimizerRow, bytes_per_parameter, optimizer_rows
from pipeloom.plan.memory.rank_memory import KINDS, RankMemory, memory_of_rank, memory_of_ranks
from pipeloom.plan.memory.state_bytes import OPTIMIZERS
from pipeloom.plan.memory.transformer_layers import gpt_layers, transformer_layers

__all__ = [
    "KINDS",
    "OPTIMIZERS",
    "STATES",
    "Choice",
    "LayerMemory",
    "MemoryModel",
    "MemoryRow",
    "OptimizerRow",
    "RankMemory",
    "bytes_per_parameter",
    "choose_memory",
    "gpt_layers",
    "in_stages",
    "memory_of_rank",
    "memory_of_ranks",
    "num_parameters",
    "optimizer_rows",
    "read_memory",
    "transformer_layers",
    "write_memory",
]
