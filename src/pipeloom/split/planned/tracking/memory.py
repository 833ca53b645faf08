"""`ResultMemory`: which results of modules a part has changed in place, since its arguments lie in their memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.common.overlaps import share_storage


class _Result(NamedTuple):
    name: str
    tensors: Sequence[Tensor]  # as the module returned it, and as the forward goes on with it


class ResultMemory:
    """Notes results of modules, of which a forward gets copies: one that a module passes on is found in both.

    Attributes:
        changed: the part that changed a result, by the module whose result it is.
    """

    def __init__(self) -> None:
        self._results: list[_Result] = []
        self.changed: dict[str, str] = {}

    def add(self, name: str, result: Any, given: Any) -> None:
        """The forward goes on with `given`, a copy of the module's `result`."""
        tensors = [leaf for leaf in tree_leaves((result, given)) if isinstance(leaf, Tensor)]
        self._results.append(_Result(name, tensors))

    def change(self, part: str, argument: Tensor) -> None:
        """A part has changed an argument in place."""
        changed, rest = [argument], list(self._results)
        while True:
            found = [each for each in rest if _share(each.tensors, changed)]
            if not found:
                return
            self.changed |= {each.name: part for each in found}
            changed += [tensor for each in found for tensor in each.tensors]
            rest = [each for each in rest if all(each is not other for other in found)]


def _share(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(share_storage(one, other) for one in some for other in others)
