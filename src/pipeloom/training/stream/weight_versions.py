"""The versions of a stage's parameters that exist at once while a stream runs.

The user's parameters, which the optimizer has, always hold the newest values. No forward uses them: in the modules they
are replaced by leaves that share their memory, one leaf per version. The tensors that autograd saved of a leaf stay
valid when the optimizer writes into a parameter. Before it writes:

    a later backward needs the newest version     the parameter moves to a copy, its old memory stays with the version
    no backward needs the newest version          the update is made in place, the leaf becomes the next version

So there are as many versions as `pipeloom.ir.versions` predicts. Where a parameter did not change (frozen, or without a
gradient), versions share its leaf. A version is freed after the last backward that uses it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import repeat

import torch
from torch import Tensor, nn

from pipeloom.errors import RunError

Gradients = list[Tensor | None]  # in the order of `WeightVersions.parameters`
_NOTHING: Iterable[None] = repeat(None)


class WeightVersions:
    """The parameters of one stage on one rank during a run. Parameters that require no gradient are left alone.

    Args:
        module: the stage.
        uses: for each version, how many backwards of this rank use it. The counts are decremented.
        trained: the parameters that updates may change.

    Attributes:
        parameters: the user's, each once however often the module has it.
        num_bytes: of `parameters` in all versions that exist.
        peak_versions: the most versions that existed at once.
    """

    def __init__(self, module: nn.Module, uses: Counter[int], trained: Set[nn.Parameter]) -> None:
        homes: dict[nn.Parameter, list[tuple[dict[str, nn.Parameter | None], str]]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    homes.setdefault(parameter, []).append((part._parameters, name))
        self.parameters = list(homes)
        self._homes = list(homes.values())
        self._uses = uses
        self._changes = [parameter in trained for parameter in self.parameters]
        self._newest = 0
        self._installed: int | None = None
        self._leaves: dict[int, list[nn.Parameter]] = {0: [_leaf(parameter) for parameter in self.parameters]}
        self._sums: dict[int, Gradients] = {}  # by update: the gradients of its backwards so far
        self._sizes = [parameter.nbytes for parameter in self.parameters]
        self.num_bytes = sum(self._sizes)
        self.peak_versions = 1

    def install(self, version: int) -> None:
        """Put `version` into the module."""
        if version != self._installed:
            for leaf, homes in zip(self._leaves[version], self._homes, strict=True):
                for place, name in homes:
                    place[name] = leaf
            self._installed = version

    def begin_backward(self, version: int, update: int) -> None:
        """Called before a backward, which adds to the sum of the earlier backwards of the same update."""
        self.install(version)
        for leaf, gradient in zip(self._leaves[version], self._sums.get(update, ()), strict=False):
            leaf.grad = gradient

    def end_backward(self, version: int, update: int) -> None:
        """Called after a backward: takes the sum off the leaves, and frees the version after its last use."""
        leaves = self._leaves[version]
        self._sums[update] = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        self._uses[version] -= 1
        if not self._uses[version] and version != self._newest:
            self.install(self._newest)
            leaves = self._leaves.pop(version)
            # Versions that share a leaf are neighbours: a leaf in neither neighbour is freed.
            older = self._leaves.get(max((v for v in self._leaves if v < version), default=-1), _NOTHING)
            newer = self._leaves[min(v for v in self._leaves if v > version)]
            for leaf, one, other, size in zip(leaves, older, newer, self._sizes, strict=False):
                if leaf is not one and leaf is not other:
                    self.num_bytes -= size

    def gradients(self, update: int) -> Gradients:
        """The sum over the backwards of one update, in their order; None where there was no gradient.

        Raises:
            RunError: one of them is sparse.
        """
        sums = self._sums[update]
        if any(gradient is not None and gradient.layout is not torch.strided for gradient in sums):
            raise RunError(
                "a parameter has a sparse gradient, which a stream does not support. Build the embedding with "
                "sparse=False."
            )
        return sums

    def update(self, update: int, gradients: Sequence[Tensor | None], step: Callable[[], None]) -> None:
        """Make the next version.

        Args:
            update: which update; its sum is dropped.
            gradients: of `parameters`.
            step: called with these in ``.grad``; changes the parameters that have one.

        Raises:
            RunError: a parameter has a gradient that no backward of this stage made.
        """
        del self._sums[update]
        if any(parameter.grad is not None for parameter in self.parameters):
            raise RunError(
                "a parameter has a gradient that no backward of this stage's versions made: a stage must read its "
                "parameters as attributes of its modules in every call. Keep no other reference to a parameter."
            )
        leaves, needed = self._leaves[self._newest], self._uses[self._newest] > 0
        # Where no backward needs the newest version, the version before it may still share a leaf with it.
        before = max((v for v in self._leaves if v < self._newest or needed), default=-1)
        kept = self._leaves.get(before, _NOTHING)
        columns = zip(self.parameters, leaves, kept, self._changes, gradients, strict=False)
        for parameter, leaf, other, changes, gradient in columns:
            parameter.grad = gradient
            if changes and leaf is other and gradient is not None:
                parameter.data = parameter.data.clone()
        try:
            step()
        finally:
            for parameter in self.parameters:
                parameter.grad = None
        torch.clear_autocast_cache()  # it may hold casts of leaves that changed in place
        if not needed:
            del self._leaves[self._newest]
            if self._installed == self._newest:
                self._installed = None
        self._newest += 1
        made = self._leaves[self._newest] = list(leaves)
        for index, (parameter, leaf, other) in enumerate(zip(self.parameters, leaves, kept, strict=False)):
            if leaf.data_ptr() != parameter.data_ptr():
                made[index] = _leaf(parameter)
                if leaf is other:
                    self.num_bytes += self._sizes[index]
        self.peak_versions = max(self.peak_versions, len(self._leaves))

    def close(self) -> None:
        """Put the user's parameters back into the modules, and free all versions."""
        for parameter, homes in zip(self.parameters, self._homes, strict=True):
            parameter.grad = None
            for place, name in homes:
                place[name] = parameter
        self._leaves.clear()
        self._sums.clear()


def _leaf(parameter: nn.Parameter) -> nn.Parameter:
    """A leaf that shares memory with `parameter` but not its version counter, so that autograd allows writing to it."""
    leaf = nn.Parameter(parameter.data)
    if parameter._backward_hooks:
        leaf._backward_hooks = parameter._backward_hooks
    return leaf
