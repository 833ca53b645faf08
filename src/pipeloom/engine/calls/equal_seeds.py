"""Ranks along tp share layers, so what those draw at random has to be equal on all of them."""

from collections.abc import Iterable
from zlib import crc32

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from pipeloom.engine.stores.blocks import Blocks
from pipeloom.errors import InputError
from pipeloom.slicing.dropout_parts import dropout_parts


def check_seeds(modules: Iterable[nn.Module], blocks: Blocks) -> None:
    """Raise where layers draw random numbers in training, and the generators of the ranks that share them differ.

    Every one of these ranks calls it, before their first step.

    Args:
        modules: the stages of this process.
        blocks: how the ranks share them.

    Raises:
        InputError: on all of these ranks.
    """
    modules = list(modules)
    drawing = next((found for stage in modules for each in stage.modules() if (found := _draws(each))), "")
    if not (blocks.divides and drawing) or any(dropout_parts(each).one_generator for each in modules):
        return
    device = next((p.device for stage in modules for p in stage.parameters()), torch.device("cpu"))
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    own = crc32(state.numpy().tobytes())
    others = blocks.sum(torch.tensor([int(own != blocks.common(own))]))
    if int(others):
        raise InputError(
            f"ranks along tp draw different random numbers for {drawing}: they share its layers, so torch's generator "
            "must be in the same state on all of them. Call torch.manual_seed with the same seed on all ranks along tp."
        )


def _draws(module: nn.Module) -> str:
    """What a module draws random numbers for in training, for messages; empty: nothing is known."""
    if not module.training:
        return ""
    if getattr(module, "draws_random_numbers", False):
        return "a router"
    own = vars(module)
    rates = (
        [own["p"]] if isinstance(module, _DropoutNd) else [own.get(name) for name in ("dropout", "attention_dropout")]
    )
    return "dropout" if any(isinstance(rate, float) and rate > 0 for rate in rates) else ""
