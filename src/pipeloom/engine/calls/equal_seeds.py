"""Ranks along tp share layers, so what those draw at random has to be equal on all of them."""

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pipeloom.slicing.dropout_parts import dropout_parts


def drawing_state(modules: Iterable[nn.Module]) -> int:
    """A number for the state of torch's generator, equal on ranks with equal states.

    Args:
        modules: the stages of this process.

    Returns:
        0 where none of them is known to draw random numbers in training, or ranks are threads, which share a generator.
    """
    modules = list(modules)
    draws = any(_draws(each) for stage in modules for each in stage.modules())
    if not draws or any(dropout_parts(each).one_generator for each in modules):
        return 0
    device = next((p.device for stage in modules for p in stage.parameters()), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    return crc32(state.numpy().tobytes()) + 1


def different_states(states: Sequence[int], lines: Iterable[Sequence[int]]) -> str:
    """The error text for ranks that share layers and draw from generators in different states; empty: there are none.

    Args:
        states: `drawing_state` of each rank; 0: not to be compared.
        lines: groups of ranks that share layers.
    """
    for line in lines:
        drawing = [rank for rank in line if states[rank]]
        other = next((rank for rank in drawing if states[rank] != states[drawing[0]]), None)
        if other is not None:
            return (
                f"ranks {drawing[0]} and {other} draw different random numbers for dropout or routers: ranks along tp "
                "share layers, so torch's generator must be in the same state on all of them. Call torch.manual_seed "
                "with the same seed on all ranks along tp."
            )
    return ""


def _draws(module: nn.Module) -> bool:
    """Whether a module is known to draw random numbers in training."""
    if not module.training:
        return False
    if getattr(module, "draws_random_numbers", False):
        return True
    own = vars(module)
    rates = (
        [own["p"]] if isinstance(module, _DropoutNd) else [own.get(name) for name in ("dropout", "attention_dropout")]
    )
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
