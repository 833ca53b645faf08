"""Where a model can be cut, and what lies between two cuts.

A chain can be cut behind every layer. A graph of layers can be cut at every set of layers that contains the inputs of
its layers (a down-set; PipeDream's optimizer calls the layers at its edge an antichain). A stage is what one such set
has more than another, so no value flows from a later stage to an earlier one. The output of a layer crosses a cut if
a layer behind the cut reads it. It crosses once, however many layers read it, and crosses every cut up to its last
reader: stages pass it on.

Cuts are numbered from 0, no layers, to `count`, all layers, and a larger set has a larger number. Stages of layers
first..last of the dynamic programmes are the layers between cut `first` and cut `last` + 1. Of a graph, this is a stage
only where one set contains the other.

A layer without inputs, time, weights and output bytes changes nothing. It goes with the first layer that reads it, and
no stage has only such layers.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeloom.plan.partition.profile import LayerProfile, Profile
from pipeloom.split.chain_partition import Tie, weights_added

Array = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_CUTS = 2_000


class Cuts:
    """The cuts of a profile.

    In a graph with more than `MOST_CUTS` down-sets, the shortest layers are kept together with the only layer that
    reads them, where this is its only input, until there are few enough. If there are still too many (branches side
    by side), the graph is cut only between layers in the order of the profile.

    Attributes:
        count: number of cuts, without that in front of all layers.
        sizes: layers in front of each cut, shape (count + 1,).
        crossing: bytes that cross the cut behind each `last`, shape (count,); of a chain, with the model's output.
        nested: whether layers first..last are a stage, shape (count, count).
        complete: whether all cuts of the graph are here.
    """

    def __init__(self, profile: Profile) -> None:
        self._num_layers, self._edges = len(profile.layers), profile.edges
        self._values = profile.layers
        self._sets: Bools | None = None
        self.complete = True
        if profile.edges is None:
            self.count = self._num_layers
            self.sizes = np.arange(self.count + 1)
            self.crossing = np.array([layer.activation_bytes for layer in profile.layers])
            self.nested = np.tri(self.count, dtype=bool).T
            return
        inputs = [0] * self._num_layers  # of each layer, as bits
        for source, target in profile.edges:
            inputs[target] |= 1 << source
        self._free = _free(profile.layers, inputs)
        found = _down_sets(inputs, self._free)
        if found is None:
            self.complete = False
            found = _coarser_sets(profile.layers, profile.edges, self._free) or _in_order(len(inputs), self._free)
        self._sets = np.array([[bits >> layer & 1 for layer in range(self._num_layers)] for bits in found], dtype=bool)
        self.count, self.sizes = len(found) - 1, self._sets.sum(axis=1)
        self.crossing = self._crossing(profile.edges)[1:]
        missing = self._sets[:-1].astype(np.float32) @ (~self._sets[1:]).T.astype(np.float32)
        self.nested = (missing == 0) & (self.sizes[:-1, None] < self.sizes[None, 1:])

    def _crossing(self, edges: Sequence[tuple[int, int]]) -> Array:
        assert self._sets is not None
        read = np.zeros_like(self._sets)  # behind each cut
        for source, target in edges:
            read[:, source] |= ~self._sets[:, target]
        outputs = np.array([layer.activation_bytes for layer in self._values])
        found: Array = (self._sets & read) @ outputs
        return found

    def tables(self, *values: Sequence[float], ties: Sequence[Tie] = ()) -> list[Array]:
        """``[first, last]``: sums of the values of the layers of each stage, and 0 or more of what is no stage.

        Of the last values, what several layers of a stage share counts once.
        """
        if self._sets is None:
            return [_range_sums(each, ties if each is values[-1] else ()) for each in values]
        sets, columns = self._sets.astype(np.float64), np.array(values, dtype=np.float64).T
        shared = np.zeros((self._num_layers, len(ties)))
        for number, tie in enumerate(ties):
            shared[list(tie.layers), number] = 1.0
        sizes = np.array([tie.size for tie in ties])
        found = np.zeros((len(values), self.count, self.count))
        for first in range(self.count):
            inside = sets[first + 1 :] * (1.0 - sets[first])
            found[:, first, first:] = (inside @ columns).T
            found[-1, first, first:] -= np.maximum(inside @ shared - 1.0, 0.0) @ sizes
        return list(found)

    def totals(self, values: Sequence[float]) -> Array:
        """Sums of the values of all layers in front of each cut, shape (count + 1,)."""
        if self._sets is None:
            return np.array(list(accumulate(values, initial=0.0)))
        return np.asarray(self._sets @ np.array(values, dtype=np.float64), dtype=np.float64)

    def order(self, ends: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
        """The layers stage by stage, and for each stage the positions of its first and last layer among them.

        Args:
            ends: the cut behind each stage.
        """
        if self._sets is None or self._edges is None:
            return list(range(self.count)), [(first, end - 1) for first, end in pairwise([0, *ends])]
        stage_of = (~self._sets[list(ends)]).sum(axis=0)
        readers: dict[int, list[int]] = {}
        for source, target in self._edges:
            readers.setdefault(source, []).append(target)
        for layer in reversed(range(self._num_layers)):
            if self._free >> layer & 1:
                stage_of[layer] = min((stage_of[reader] for reader in readers.get(layer, ())), default=0)
        order = sorted(range(self._num_layers), key=lambda layer: (stage_of[layer], layer))
        bounds = [0, *np.cumsum(np.bincount(stage_of, minlength=len(ends))).tolist()]
        return order, [(first, end - 1) for first, end in pairwise(bounds)]


def _free(layers: Sequence[LayerProfile], inputs: Sequence[int]) -> int:
    """The layers that change nothing, as bits."""
    free = 0
    for number, layer in enumerate(layers):
        seconds, sizes = layer.forward_seconds + layer.backward_seconds, layer.activation_bytes + layer.parameter_bytes
        if not seconds and not sizes and not inputs[number] & ~free:
            free |= 1 << number
    return 0 if free == (1 << len(layers)) - 1 else free


def _down_sets(inputs: Sequence[int], free: int) -> list[int] | None:
    """All sets of layers with their inputs, as bits, by size; None if they are more than `MOST_CUTS`."""
    found, current = [0], {0}
    layers = [(1 << number, needs & ~free) for number, needs in enumerate(inputs) if not free >> number & 1]
    while current:
        larger = {here | bit for here in current for bit, needs in layers if not here & bit and not needs & ~here}
        found += sorted(larger)
        if len(found) > MOST_CUTS + 1:
            return None
        current = larger
    return found


def _in_order(num_layers: int, free: int) -> list[int]:
    """The first layers, as bits."""
    counted = (0 if free >> layer & 1 else 1 << layer for layer in range(num_layers))
    return sorted(set(accumulate(counted, int.__or__, initial=0)))


def _coarser_sets(layers: Sequence[LayerProfile], edges: Sequence[tuple[int, int]], free: int) -> list[int] | None:
    """Down-sets that do not separate short layers from their only reader; None if they are too many as well."""
    group_of = {layer: layer for layer in range(len(layers)) if not free >> layer & 1}
    while True:
        seconds, members = dict.fromkeys(group_of.values(), 0.0), dict.fromkeys(group_of.values(), 0)
        for layer, group in group_of.items():
            seconds[group] += layers[layer].forward_seconds + layers[layer].backward_seconds
            members[group] |= 1 << layer
        needs: dict[int, set[int]] = {group: set() for group in members}
        readers: dict[int, set[int]] = {group: set() for group in members}
        for source, target in edges:
            if source in group_of and group_of[source] != group_of[target]:
                needs[group_of[target]].add(group_of[source])
                readers[group_of[source]].add(group_of[target])
        groups = list(members)
        found = _down_sets([sum(1 << groups.index(need) for need in needs[group]) for group in groups], 0)
        if found is not None:
            parts = ([part for number, part in enumerate(members.values()) if bits >> number & 1] for bits in found)
            return sorted((sum(each) for each in parts), key=lambda bits: (bits.bit_count(), bits))
        alone = [(min(readers[group]), group) for group in groups if len(readers[group]) == 1]
        pairs = sorted((seconds[a] + seconds[b], a, b) for b, a in alone if len(needs[b]) == 1)
        if not pairs:
            return None
        merged: dict[int, int] = {}
        for _, first, second in pairs[: 1 + len(pairs) // 4]:
            if not {first, second} & (merged.keys() | merged.values()):
                merged[second] = first
        group_of = {layer: merged.get(group, group) for layer, group in group_of.items()}


def _range_sums(values: Sequence[float], ties: Sequence[Tie] = ()) -> Array:
    """``[i, j]``: the sum of values i..j; added from i on, so that equal ranges have equal sums."""
    table = np.zeros((len(values), len(values)))
    for first in range(len(values)):
        table[first, first:] = np.cumsum(weights_added(values, ties, first))
    return table
