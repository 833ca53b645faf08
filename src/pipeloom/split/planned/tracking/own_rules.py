"""Gradients in a way of their own between the parts of a model.

`OwnRules`: gradient rules of a model's own that several stages apply, each to a part of a gradient.

A value between the parts of several stages is computed on each of them, and the gradients that it gets there are added
up. A rule that is linear, as every derivative is, gives the same sum; one that clips or normalizes does not.

`function_around`: a function that runs a part and computes its gradient, such as `torch.utils.checkpoint`.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

_STAGE = str(Path(__file__).parents[1] / "stage.py")  # whose `_run` calls the forward
_FUNCTIONS = {
    "/torch/utils/checkpoint.py": "torch.utils.checkpoint",
    "/torch/autograd/function.py": "an autograd.Function",
    "/torch/_functorch/": "a transform of torch.func",
    "/torch/_higher_order_ops/": "an operator such as torch.cond",
}


def function_around() -> str | None:
    """The innermost function around the part that a stage's forward calls now which computes gradients in its own way.

    Called by `Exploration`, between a part and the stage.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (frame.f_code.co_name == "_run" and frame.f_code.co_filename == _STAGE):
        for path, function in _FUNCTIONS.items():
            if path in frame.f_code.co_filename:
                return function
        frame = frame.f_back
    return None


class OwnRules:
    """Notes rules through which a stage's own parts read results of modules.

    Attributes:
        found: a rule, by the module whose result it follows from.
    """

    def __init__(self) -> None:
        self._begins: dict[Any, str] = {}  # graph nodes of results, as the forward goes on with them
        self.found: dict[str, str] = {}

    def begin(self, name: str, given: Any) -> None:
        """The forward goes on with `given`, the result of the module `name`."""
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._begins[leaf.grad_fn] = name

    def read(self, value: Any) -> None:
        """A part reads a value."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        for node in self._between(nodes):
            if isinstance(node, BackwardCFunction):
                below = [self._begins[each] for each in self._between([node], to_results=True) if each in self._begins]
                self.found |= dict.fromkeys(below, type(node).__name__.removesuffix("Backward"))

    def _between(self, nodes: list[Any], *, to_results: bool = False) -> Iterator[Any]:
        """The nodes of a graph from `nodes` back to results of modules, with those or without."""
        seen, left = set[Any](), list(nodes)
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node not in self._begins:
                left += [each for each, _ in node.next_functions]
            elif not to_results:
                continue
            yield node
