"""Candidates: configurations of which nothing is open. They are simulated, or change what they keep. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

from pipeloom.errors import PipeloomError
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.search.memory.memory_choice import Choice, MemoryChoices
from pipeloom.plan.search.memory.offload_bound import lowest_cap, offloaded_of
from pipeloom.plan.search.request import Refusals, Request
from pipeloom.plan.search.simulated import Simulated, Step, Steps
from pipeloom.plan.search.space.shapes import Shape, candidate_seconds
from pipeloom.plan.search.space.ways import Way

SIZES = "the schedule does not support the sizes"
_TRIES = 2  # of keeping fewer activations, where a simulated rank needs more memory than its closed form


@dataclass(kw_only=True)
class Candidate:
    """A configuration of which nothing is open.

    Attributes:
        shape: without data strategy and recomputation.
        of: with the data strategy.
        choice: with both.
        way: the data strategy, with bounds of a step.
        instead: those that communicate more, and are tried if this one does not fit.
        memory: makes a smaller choice, see `MemoryChoices.smaller`; None: there is none.
        tries: attempts so far.
    """

    shape: Shape
    of: Configuration
    choice: Choice
    way: Way
    instead: list["Candidate"] = field(default_factory=list)
    memory: MemoryChoices | None = None
    tries: int = 0


class Bounds(NamedTuple):
    """Seconds of a step of a candidate: at least, and likely."""

    least: float
    likely: float


class Candidates:
    """What becomes of candidates.

    Args:
        steps: simulates them.
        request: what is planned.
        refusals: where those that are refused are counted.
        exhaustive: whether all are simulated.
    """

    def __init__(self, steps: Steps, request: Request, refusals: Refusals, *, exhaustive: bool) -> None:
        self._steps, self._costs, self._request, self._refusals = steps, steps.costs, request, refusals
        self._exhaustive = exhaustive
        self._done: set[Choice] = set()

    def bounds(self, found: Candidate) -> Bounds | None:
        """None where the host has too little memory for what is offloaded."""
        of, stages_of = found.choice.of, found.shape.placement.stages_of
        update = self._costs.update_seconds(of, stages_of)
        update += self._costs.shared_sum_seconds(of, found.shape.placement)
        least, likely = candidate_seconds(self._costs, found.shape._replace(of=of))
        if of.offload is not None or of.offload_states:
            offloaded = offloaded_of(self._costs, of, stages_of)
            if offloaded.host_bytes > self._costs.cluster.host_bytes_per_device:
                self._refusals.add("what is offloaded needs more memory than the host has")
                return None
            least, likely = max(least, offloaded.seconds), max(likely, offloaded.seconds)
        others = found.way.seconds if of.offload is None else found.way.offloaded
        return Bounds(max(others, least + update), max(others, likely + update))

    def simulate(self, candidate: Candidate) -> Simulated | list[Candidate]:
        """The simulated step, or what to try in its place: nothing, or candidates that need less memory."""
        choice = candidate.choice
        if choice in self._done:
            return []
        self._done.add(choice)
        try:
            step = Step(self._steps, choice.of, choice.schedule_limit)
            peaks = step.peaks()
        except PipeloomError:
            self._refusals.add(_too_few(choice.of) or SIZES)
            return []
        if max(peaks) > self._request.memory_bytes:
            self._refusals.too_large()
            return self._smaller(candidate, peaks)
        self._refusals.add("an earlier data strategy that fits communicates less", len(candidate.instead))
        return step.simulated(peaks)

    def _smaller(self, candidate: Candidate, peaks: Sequence[float]) -> list[Candidate]:
        """Candidates that need less memory than one that does not fit, whatever its closed forms say."""
        found, memory, lacks = candidate.instead, candidate.memory, max(peaks) - candidate.choice.least_bytes
        smaller = None if memory is None else memory.smaller(candidate.of, lacks)
        if smaller is not None and smaller != candidate.choice:
            found = [replace(candidate, choice=smaller, memory=None, instead=[]), *found]
        return found + (self._keeping_fewer(candidate, peaks) if candidate.choice.of.offload is not None else [])

    def keeping_more(self, candidate: Candidate, found: Simulated) -> list[Candidate]:
        """The candidate that offloads fewer activations, where the simulated ranks of one have room for them."""
        of, most = candidate.choice.of, self._request.memory_bytes
        if self._exhaustive or "offload" in self._request.fixed or of.offload is None or candidate.tries or most == inf:
            return []
        kept, stages_of = self._costs.kept_bytes(of), candidate.shape.placement.stages_of
        rooms = [(most - peak) * of.slices for peak in found.peak_bytes]
        sizes = [[kept[stage] for stage in held] for held in stages_of]
        if any(room < min(held) for room, held in zip(rooms, sizes, strict=True)):
            return []
        more = min(int(room // max(1.0, *held)) for room, held in zip(rooms, sizes, strict=True))
        choice = replace(candidate.choice, of=of._replace(offload=of.offload + max(1, more)))
        return [replace(candidate, choice=choice, instead=[], tries=_TRIES)]

    def _keeping_fewer(self, candidate: Candidate, peaks: Sequence[float]) -> list[Candidate]:
        """The candidate that offloads more: first as if the largest activations left, then as if the smallest did.

        Some are far smaller than others, such as those of an embedding: the last keeps as few as ranks need at once.
        """
        of, tries = candidate.choice.of, candidate.tries
        if self._exhaustive or "offload" in self._request.fixed or not of.offload or tries == _TRIES:
            return []
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        kept = self._costs.kept_bytes(of)
        sizes = [kept[stage] / of.slices for stage in candidate.shape.placement.stages_of[rank]]
        missing = peaks[rank] - self._request.memory_bytes
        fewer = of.offload - max(1, ceil(missing / max(1.0, min(sizes) if tries else max(sizes))))
        number = max(fewer, lowest_cap(of))
        if number >= of.offload:
            return []
        choice = replace(candidate.choice, of=of._replace(offload=number))
        return [replace(candidate, choice=choice, instead=[], tries=tries + 1)]


def _too_few(of: Configuration) -> str | None:
    """Why ranks cannot offload all but so many activations; None: that is not the reason."""
    least = lowest_cap(of) if of.offload else 0
    if not of.offload or of.offload >= least:
        return None
    return f"offload={of.offload} keeps fewer activations than a rank needs at once ({least})"
