"""From an nn.Module to stages: which layers, where to cut, what is tied."""

from pipeloom.chain import Tie, partition
from pipeloom.split.module import StageModule
from pipeloom.split.profile import LayerTime, profile_layers
from pipeloom.split.stages import Stages, TiedParameter, profile_model, split

__all__ = [
    "LayerTime",
    "StageModule",
    "Stages",
    "Tie",
    "TiedParameter",
    "partition",
    "profile_layers",
    "profile_model",
    "split",
]
