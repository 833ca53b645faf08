"""Checkpoints: safetensors by fully qualified name, put in place whole or not at all, loaded into any layout.

    save(output_dir, step, exchange=..., model=..., optimizer=..., random=..., state=..., layout=...)   # every rank
    checkpoint = load(output_dir / "checkpoint-500")                                                  # every rank
    checkpoint.load_model(tensors); checkpoint.load_optimizer(optimizer, names); checkpoint.random(rank, size)

All names are those of the uncut model, so a checkpoint of two ranks loads into one or four. A rank that has only some
elements of a parameter says which (`ranges`), in saving and in loading. Nothing is ever unpickled.

    writer, reader       save and load
    share                what one rank writes of what it holds
    pieces               which elements lie where, of tensors that were saved in pieces
    state                optimizer and random states, by name
    manifest             the format, and what verifies it
    directory            where checkpoints lie, and how one gets there whole
    tensor_file          safetensors written as a stream, hashed and synced
    tensor_reader        tensors, or some of their elements, out of such files
    exchange             how the ranks of a save tell each other small things
    convert              to the layout of Hugging Face

`manifest`, `pieces`, `directory` and `convert` need no torch, and what does is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "Checkpoint": "reader",
    "OptimizerState": "state",
    "RandomState": "state",
    "latest": "directory",
    "list_checkpoints": "directory",
    "load": "reader",
    "optimizer_state": "state",
    "random_state": "state",
    "resolve": "directory",
    "restore_random_state": "state",
    "save": "writer",
    "verify": "manifest",
}

__all__ = [
    "Checkpoint",
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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
