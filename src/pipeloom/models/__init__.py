"""Small models for examples, tests and the main job."""

from pipeloom.models.gpt import GPT, GPTConfig, loss_fn
from pipeloom.models.init import init_parameters, materialize

__all__ = ["GPT", "GPTConfig", "init_parameters", "loss_fn", "materialize"]
