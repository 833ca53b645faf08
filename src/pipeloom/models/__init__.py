"""Small models for examples, tests and the main job. What needs torch is loaded at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeloom.models.gpt_config import GPTConfig

if TYPE_CHECKING:
    from pipeloom.models.gpt import GPT, loss_fn
    from pipeloom.models.init import init_parameters, materialize

_HOMES = {"GPT": "gpt", "init_parameters": "init", "loss_fn": "gpt", "materialize": "init"}

__all__ = ["GPT", "GPTConfig", "init_parameters", "loss_fn", "materialize"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
