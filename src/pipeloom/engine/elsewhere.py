"""`find_elsewhere`: losses and outputs of stages must not follow from parameters that only another rank trains."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

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


def find_elsewhere(values: Iterable[Tensor], elsewhere: Elsewhere) -> str | None:
    """The name of one of these parameters that values follow from: its gradient would be lost; None: of none."""
    todo: list[Any] = [each.grad_fn for each in values if each.grad_fn is not None] if elsewhere else []
    seen = {*todo}
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        parameter, name = elsewhere.get(id(leaf), (None, ""))
        if parameter is not None and parameter() is leaf:
            return name
        new = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(new)
        todo += new
    return None
