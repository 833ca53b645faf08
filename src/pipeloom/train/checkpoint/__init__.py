"""Checkpoints: safetensors files by parameter name, written atomically, loaded into any layout.

    save(output_dir, step, exchange=..., model=..., optimizer=..., random=..., state=..., layout=...)   # every rank
    checkpoint = load(output_dir / "checkpoint-500")                                                  # every rank
    checkpoint.load_model(tensors); checkpoint.load_optimizer(optimizer, names); checkpoint.random(rank, size)

All names are those of the full model, so a checkpoint of two ranks loads into one or four. A rank that holds a shard of
a parameter passes its range of elements (`ranges`) to save and load. A rank that shares a stage with others passes the
block of the parameter that it holds (`blocks`). Nothing is ever unpickled.

    writer, reader       save and load
    rank_files           the files that one rank writes; written: which rank writes what
    state                optimizer and random states, by name
    manifest             the format and its verification
    pieces, boxes        where the elements of a sharded tensor are stored; block_shards: where a rank's are
    directory            names of checkpoint directories, atomic renames, clean-up
    tensor_reader        reads tensors, or some of their elements
    resume               which checkpoint a run goes on from
    convert              conversion to the layout of Hugging Face

`manifest`, `directory` and `convert` need no torch. Names that do are imported lazily.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.processes.exchange import DistributedExchange, Exchange
    from pipeloom.train.checkpoint.directory import latest, list_checkpoints, resolve
    from pipeloom.train.checkpoint.manifest import verify
    from pipeloom.train.checkpoint.reader import Checkpoint, load
    from pipeloom.train.checkpoint.state import (
        OptimizerState,
        RandomState,
        optimizer_state,
        random_state,
        restore_random_state,
    )
    from pipeloom.train.checkpoint.writer import save

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.processes.exchange": "DistributedExchange Exchange",
    "pipeloom.train.checkpoint.directory": "latest list_checkpoints resolve",
    "pipeloom.train.checkpoint.manifest": "verify",
    "pipeloom.train.checkpoint.reader": "Checkpoint load",
    "pipeloom.train.checkpoint.state": "OptimizerState RandomState optimizer_state random_state restore_random_state",
    "pipeloom.train.checkpoint.writer": "save",
}

__all__ = [
    "Checkpoint",
    "DistributedExchange",
    "Exchange",
    "OptimizerState",
    "RandomState",
    "latest",
    "list_checkpoints",
    "load",
    "optimizer_state",
    "random_state",
    "resolve",
    "restore_random_state",
    "save",
    "verify",
]


__getattr__ = lazy_exports(__name__, _LAZY)
