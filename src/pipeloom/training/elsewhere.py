"""`check_leaves`: a user's loss must not follow from parameters that are on another rank."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipeloom.errors import InputError

# Weak references by identity of the parameter, with its name.
Elsewhere = Mapping[int, tuple["weakref.ref[nn.Parameter]", str]]


def parameters_elsewhere(stages: Sequence[nn.Module], own: Sequence[int]) -> Elsewhere:
    """The parameters of the model that no stage of this process has.

    Args:
        stages: of the whole model.
        own: those of this process.
    """
    held = {id(parameter) for stage in own for parameter in stages[stage].parameters()}
    named = (item for stage in stages for item in stage.named_parameters())
    return {id(parameter): (weakref.ref(parameter), name) for name, parameter in named if id(parameter) not in held}


def check_leaves(loss: Tensor, elsewhere: Elsewhere) -> None:
    """Raises InputError where a loss follows from one of these parameters: its gradient would be lost."""
    todo: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        parameter, name = elsewhere.get(id(leaf), (None, ""))
        if parameter is not None and parameter() is leaf:
            raise InputError(
                f"loss_fn reads the parameter {name!r}, which is on another rank: its gradient would be lost. Add the "
                "term in the layers that have the parameters, with pl.auxiliary_loss, or use the optimizer's "
                "weight_decay."
            )
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        todo += new
