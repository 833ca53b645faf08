"""The candidates of a shape: which data strategy, recomputation and offload are simulated first. No torch here."""

from collections.abc import Sequence

from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.memory.memory_choice import MemoryChoices
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.space.shapes import Shape
from pipeloom.plan.search.space.ways import Way
from pipeloom.plan.search.tree.candidates import Candidate

_OF_WAY = "strategy", "granularity", "offload_states"


class ShapeCandidates:
    """The candidates of a shape. Those that communicate more than another are tried if that one does not fit.

    Args:
        shape: a configuration with blocks per stage.
        memory: what its stages may recompute and offload.
        request: what is planned.
        exhaustive: whether all are tried.
        again: whether smaller choices are tried where one does not fit.

    Attributes:
        fit: the ways of candidates, which fit by closed forms.
    """

    def __init__(self, shape: Shape, memory: MemoryChoices, request: Request, *, exhaustive: bool, again: bool) -> None:
        self._shape, self._memory, self._exhaustive = shape, memory, exhaustive
        self._smaller = memory if again and not exhaustive else None
        self._takes_all = exhaustive or request.objective == "memory"
        self._states_fixed = "offload_states" in request.fixed
        self.fit = set[Way]()

    def kept(self, ways: Sequence[Way]) -> list[Candidate]:
        """Those whose activations stay on the device."""
        first, candidates = dict[object, Candidate](), list[Candidate]()  # `first` by recomputation
        for way in ways:
            of = with_way(self._shape.of, way)
            for choice in self._memory.found(of, every=self._exhaustive):
                self.fit.add(way)
                found = Candidate(shape=self._shape, of=of, choice=choice, way=way, memory=self._smaller)
                kinds, slower = found.choice.of.recompute, of.strategy.shards_gradients or of.offload_states
                before = first.get(kinds)
                if before is not None and slower and not self._takes_all:
                    before.instead.append(found)
                    continue
                if not of.offload_states or self._states_fixed:
                    first.setdefault(kinds, found)
                candidates.append(found)
        return candidates

    def offloaded(self, ways: Sequence[Way]) -> list[Candidate]:
        """Those with activations that leave."""
        first, candidates = dict[object, Candidate | None](), list[Candidate]()  # None: all activations fit
        least = self._memory.uniform()[0]
        for way in ways:
            if not self._takes_all and first.get(least, way) is None:
                break
            of = with_way(self._shape.of, way)
            for recompute, choices in self._memory.offloaded(of, every=self._exhaustive).items():
                if not choices and not of.offload_states:
                    first[recompute] = None
                for choice in choices:
                    self.fit.add(way)
                    found = Candidate(shape=self._shape, of=of, choice=choice, way=way)
                    if recompute in first and not self._takes_all:
                        before = first[recompute]
                        if before is None:
                            continue
                        if before.choice.kept >= choice.kept:  # and communicates less
                            before.instead.append(found)
                            continue
                    if not of.offload_states:  # whose transfers may take longer
                        first[recompute] = found
                    candidates.append(found)
        return candidates


def with_way(of: Configuration, way: Way) -> Configuration:
    """A configuration with the data strategy of a way."""
    return of._replace(**{key: getattr(way.of, key) for key in _OF_WAY})
