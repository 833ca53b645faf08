"""Gradients that a trace loses: backwards of autograd functions, hooks and inference mode are no operations.

Their results are in the trace. So the gradients of the model's own forward and of the graph are compared where the
forward has one of them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pipeloom.split.closeness import close


class OwnBackwards(TorchFunctionMode):
    """Notices, in its block, backwards that do not follow from operations.

    Attributes:
        found: what was noticed, in words; empty: nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.register_hook:
            self.found = "a hook of a tensor"
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_inference():
            self.found = "torch.inference_mode"
        return result

    def look_into(self, outputs: Any) -> None:
        """Look for functions in the graph of the outputs; hooks of modules are such functions, too."""
        waiting: list[Any] = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
        seen: set[Any] = {None}
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction) and not _is_of_checkpoint(node):
                name = type(node).__name__.removesuffix("Backward")
                of_hook = name == "BackwardHookFunction"
                self.found = "a backward hook of a module" if of_hook else f"the backward of {name}"
            waiting += [each for each, _ in node.next_functions]


def _is_of_checkpoint(node: Any) -> bool:
    """Whether it is torch's checkpointing, which takes no gradients of chosen tensors and changes none."""
    return str(getattr(node, "_forward_cls", type(node)).__module__).startswith("torch.utils.checkpoint")


def gradients(outputs: Any, sources: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of `sources` where those of the outputs are from 0.5 to 1.5."""
    roots = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not roots:
        return [None] * len(sources)
    seeds = [torch.linspace(0.5, 1.5, root.numel(), device=root.device).view_as(root).to(root.dtype) for root in roots]
    return list(torch.autograd.grad(roots, sources, seeds, allow_unused=True))


def same_gradients(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether gradients are equal, up to rounding; none is as good as zeros."""
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            if not close(one, other):
                return False
        elif any(each is not None and bool(each.count_nonzero()) for each in (one, other)):
            return False
    return True
