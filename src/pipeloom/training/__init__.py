"""The front door: `Pipeline` and `Stream` train a model, with optimizer steps and gradient clipping."""

from pipeloom.processes.watchdog import Watchdog
from pipeloom.training.clipping import clip_by_norms, clip_grad_norm, gradient_norms
from pipeloom.training.fastest_plan import fastest_plan
from pipeloom.training.loss_scaler import LossScaler
from pipeloom.training.nonfinite import NonFiniteSearch
from pipeloom.training.observations import AuxiliaryValue
from pipeloom.training.optimizer_step import BarrierStep, OptimizerStep, Update
from pipeloom.training.optimizers.lion import Lion
from pipeloom.training.optimizers.muon import Muon
from pipeloom.training.pipeline import Pipeline
from pipeloom.training.post_validation.step import PostValidatedStep
from pipeloom.training.stream.results import StreamUpdate
from pipeloom.training.stream.stream import Stream

__all__ = [
    "AuxiliaryValue",
    "BarrierStep",
    "Lion",
    "LossScaler",
    "Muon",
    "NonFiniteSearch",
    "OptimizerStep",
    "Pipeline",
    "PostValidatedStep",
    "Stream",
    "StreamUpdate",
    "Update",
    "Watchdog",
    "clip_by_norms",
    "clip_grad_norm",
    "fastest_plan",
    "gradient_norms",
]
