"""Run a schedule: executor, stages, transports.

What needs torch is loaded when it is first used: `pipeloom.runtime.launcher` works without.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeloom.runtime.black_box import BLACKBOX_BYTES
    from pipeloom.runtime.collectives import all_gather_bytes
    from pipeloom.runtime.gradients import clip_by_norms, clip_grad_norm, gradient_norms
    from pipeloom.runtime.loopback import LoopbackTransport
    from pipeloom.runtime.loss_scale import LossScaler
    from pipeloom.runtime.mixed import MixedTransport
    from pipeloom.runtime.optimizer_step import BarrierStep, OptimizerStep, Update, update_parameters
    from pipeloom.runtime.pipeline import Pipeline
    from pipeloom.runtime.post_validation import PostValidatedStep
    from pipeloom.runtime.stream import Stream
    from pipeloom.runtime.stream_results import StreamUpdate
    from pipeloom.runtime.transport import Channel, Incoming, Lane, Outgoing, Transport
    from pipeloom.runtime.values import Layout
    from pipeloom.runtime.worker import RUNNABLE_OPS

# Public names, and the module each lives in.
_HOMES = {
    "BLACKBOX_BYTES": "pipeloom.runtime.black_box",
    "BarrierStep": "pipeloom.runtime.optimizer_step",
    "Channel": "pipeloom.runtime.transport",
    "Incoming": "pipeloom.runtime.transport",
    "Lane": "pipeloom.runtime.transport",
    "Layout": "pipeloom.runtime.values",
    "LoopbackTransport": "pipeloom.runtime.loopback",
    "LossScaler": "pipeloom.runtime.loss_scale",
    "MixedTransport": "pipeloom.runtime.mixed",
    "Outgoing": "pipeloom.runtime.transport",
    "OptimizerStep": "pipeloom.runtime.optimizer_step",
    "Pipeline": "pipeloom.runtime.pipeline",
    "PostValidatedStep": "pipeloom.runtime.post_validation",
    "RUNNABLE_OPS": "pipeloom.runtime.worker",
    "Stream": "pipeloom.runtime.stream",
    "StreamUpdate": "pipeloom.runtime.stream_results",
    "Transport": "pipeloom.runtime.transport",
    "all_gather_bytes": "pipeloom.runtime.collectives",
    "Update": "pipeloom.runtime.optimizer_step",
    "clip_by_norms": "pipeloom.runtime.gradients",
    "clip_grad_norm": "pipeloom.runtime.gradients",
    "gradient_norms": "pipeloom.runtime.gradients",
    "update_parameters": "pipeloom.runtime.optimizer_step",
}

__all__ = [
    "BLACKBOX_BYTES",
    "RUNNABLE_OPS",
    "BarrierStep",
    "Channel",
    "Incoming",
    "Lane",
    "Layout",
    "LoopbackTransport",
    "LossScaler",
    "MixedTransport",
    "OptimizerStep",
    "Outgoing",
    "Pipeline",
    "PostValidatedStep",
    "Stream",
    "StreamUpdate",
    "Transport",
    "Update",
    "all_gather_bytes",
    "clip_by_norms",
    "clip_grad_norm",
    "gradient_norms",
    "update_parameters",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pipeloom.runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
