"""`ResultMemory`: which results of modules lie in the same memory, and which of them are changed in place."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.common.overlaps import share_storage


class _Result(NamedTuple):
    name: str
    tensors: Sequence[Tensor]  # as the module returned it, and as the forward goes on with it


class ResultMemory:
    """Notes results of modules, of which a forward gets copies: one that a module passes on is found in both.

    Args:
        aliases: names of results, and of earlier ones in whose memory each lies, as found on earlier stages.

    Attributes:
        aliases: these, and those found here.
        changed: what changed a result, by the module whose result it is.
        stale: tensors that a model without stages would have changed too, and what changed them.
    """

    def __init__(self, aliases: Mapping[str, Sequence[str]]) -> None:
        self._results: list[_Result] = []
        self.aliases = dict(aliases)
        self.changed: dict[str, str] = {}
        self.stale: list[tuple[Tensor, str, str]] = []

    def add(self, name: str, result: Any, given: Any) -> None:
        """The forward goes on with `given`, a copy of the module's `result`."""
        tensors = [leaf for leaf in tree_leaves((result, given)) if isinstance(leaf, Tensor)]
        if earlier := [each.name for each in self._results if _share(each.tensors, tensors)]:
            self.aliases[name] = list(dict.fromkeys([*self.aliases.get(name, ()), *earlier]))
        self._results.append(_Result(name, tensors))

    def change(self, by: str, tensor: Tensor, *, of_all: bool) -> None:
        """A tensor is changed in place.

        Args:
            by: what changes it.
            tensor: it.
            of_all: whether the same happens on every stage that has the tensor, as it does in the model's own code.
        """
        names, changed, rest = set[str](), [tensor], list(self._results)
        while found := [each for each in rest if _share(each.tensors, changed) or self._is_alias(each.name, names)]:
            names |= {each.name for each in found}
            changed += [part for each in found for part in each.tensors]
            rest = [each for each in rest if all(each is not other for other in found)]
        for each in self._results:
            if each.name in names:
                apart = not _share(each.tensors, [tensor])
                if apart or not of_all:
                    self.changed[each.name] = by
                if apart:
                    self.stale += [(part, by, each.name) for part in each.tensors]

    def _is_alias(self, name: str, others: set[str]) -> bool:
        lies_in = self.aliases.get(name, ())
        return any(other in lies_in or name in self.aliases.get(other, ()) for other in others)


def _share(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(share_storage(one, other) for one in some for other in others)
