"""The front door: `Pipeline` and `Stream` train a model, with optimizer steps and gradient clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.training.optimizer_step import (
        BarrierStep,
        LossScaler,
        OptimizerStep,
        Update,
        clip_by_norms,
        clip_grad_norm,
        gradient_norms,
    )
    from pipeloom.training.pipeline import Pipeline
    from pipeloom.training.post_validation.step import PostValidatedStep
    from pipeloom.training.stream.results import StreamUpdate
    from pipeloom.training.stream.stream import Stream

# Public names, and the module that each lives in.
_HOMES = {
    "BarrierStep": "pipeloom.training.optimizer_step",
    "LossScaler": "pipeloom.training.optimizer_step",
    "OptimizerStep": "pipeloom.training.optimizer_step",
    "Pipeline": "pipeloom.training.pipeline",
    "PostValidatedStep": "pipeloom.training.post_validation.step",
    "Stream": "pipeloom.training.stream.stream",
    "StreamUpdate": "pipeloom.training.stream.results",
    "Update": "pipeloom.training.optimizer_step",
    "clip_by_norms": "pipeloom.training.optimizer_step",
    "clip_grad_norm": "pipeloom.training.optimizer_step",
    "gradient_norms": "pipeloom.training.optimizer_step",
}

__all__ = [
    "BarrierStep",
    "LossScaler",
    "OptimizerStep",
    "Pipeline",
    "PostValidatedStep",
    "Stream",
    "StreamUpdate",
    "Update",
    "clip_by_norms",
    "clip_grad_norm",
    "gradient_norms",
]

__getattr__ = lazy_exports(__name__, _HOMES)
