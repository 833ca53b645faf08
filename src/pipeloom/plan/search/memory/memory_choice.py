"""Recomputation and offload of a configuration whose memory is short. No torch here.

Of each rank, activations of how many micro-batches are in flight on each of its stages follows from its schedule. The
least recomputation is a knapsack per rank: over its stages, the least extra time with which the rank fits. Bytes are
those of some moments of the step, so that they are never more than its peak.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from math import inf
from operator import add, sub

from pipeloom import schedules
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.step_costs import StepCosts
from pipeloom.plan.memory.state_bytes import NumberBytes
from pipeloom.plan.search.memory.knapsack import knapsack
from pipeloom.plan.search.memory.live_moments import Moments
from pipeloom.plan.search.memory.moment_bytes import Beside, MomentBytes
from pipeloom.plan.search.memory.offload_bound import lowest_cap, most_live
from pipeloom.plan.search.memory.offload_room import OffloadRoom
from pipeloom.plan.search.memory.stage_bytes import KnownBytes
from pipeloom.plan.search.request import Request
from pipeloom.plan.search.space.shapes import Shape
from pipeloom.plan.search.space.ways import state_bytes_per_parameter

_TRIES = 8
_SHARE = 0.97  # of memory, where closed forms lack a little
_FEWER = 0.95  # of the bytes of an activation: less recomputation with offload is as good


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A configuration of which nothing is open.

    Attributes:
        of: the configuration.
        schedule_limit: of `Simulated`.
        least_bytes: of the rank that needs most, at least.
    """

    of: Configuration
    schedule_limit: float | None = None
    least_bytes: float = 0.0

    @property
    def kept(self) -> float:
        """Activations that stay on a rank."""
        return inf if self.of.offload is None else self.of.offload


class MemoryChoices:
    """What the stages of a shape recompute.

    Args:
        costs: of the model on its cluster.
        shape: a configuration with blocks per stage.
        moments: of its ranks.
        request: what is planned.
        known: bytes of other shapes with these costs.
    """

    def __init__(
        self, costs: StepCosts, shape: Shape, moments: Moments, request: Request, known: KnownBytes | None = None
    ) -> None:
        self._costs, self._shape, self._moments, self._request = costs, shape, moments, request
        of, self._kinds = shape.of, request.kinds
        self._found: dict[object, list[Choice]] = {}
        self._offloaded: dict[object, dict[tuple[Recompute, ...], list[Choice]]] = {}
        self._share = _SHARE if request.of_many else 1.0
        self._offloads = (
            request.offloads_activations and costs.can_offload and not schedules.find(of.schedule).to_measure
        )
        self._kept = {
            kind: [size / of.slices for size in costs.kept_bytes(of._replace(recompute=kind))] for kind in self._kinds
        }
        self._of_recompute: dict[tuple[Recompute, ...], list[list[float]]] = {}
        self._bytes_beside = MomentBytes(costs, shape, moments, known or KnownBytes())
        self._room = OffloadRoom(costs, shape, moments, self._kept)

    @cached_property
    def _seconds(self) -> dict[Recompute, list[float]]:
        """Seconds of one micro-batch per stage, by kind of recomputation."""
        of = self._shape.of
        return {kind: list(map(sum, self._costs.stage_seconds(of._replace(recompute=kind)))) for kind in self._kinds}

    @staticmethod
    def key(shape: Shape, request: Request) -> Hashable:
        """Of all that the choices depend on, but for the model and its cluster."""
        recompute, offload = (request.fixed.get(name) for name in ("recompute", "offload"))
        given = recompute and tuple(recompute), offload, request.offloads_activations
        return shape.of, shape.split, request.kinds, request.memory_bytes, request.objective, given

    def found(self, of: Configuration, *, every: bool = False) -> list[Choice]:
        """The choice with the least extra time that fits by closed forms.

        On many devices, where there is no time for a second try, some memory stays free.

        Args:
            of: the configuration of the shape, with a data strategy.
            every: whether to return `smaller`, and the same kind for all stages too, each of them, also those that do
                not fit.
        """
        key = of, every
        if key not in self._found:
            self._found[key] = self._find(of, every)
        return self._found[key]

    def _find(self, of: Configuration, every: bool) -> list[Choice]:
        uniform, offload = self.uniform(), self._request.fixed.get("offload")
        if not self._is_open:
            candidates = uniform
        elif self._request.objective == "memory":
            candidates = uniform[-1:]
        else:
            shares = dict.fromkeys((1.0, _SHARE) if every else (self._share, 1.0))
            leasts = (least for share in shares if (least := self._least_of(of, share)) is not None)
            candidates = list(leasts if every else islice(leasts, 1))
        if every:
            candidates = list(dict.fromkeys([*candidates, *uniform]))
        choices = [self._choice(of, each, self._bytes_beside.of(of), offload) for each in candidates]
        return [each for each in choices if every or each.least_bytes <= self._request.memory_bytes]

    def smaller(self, of: Configuration, missing: float) -> Choice | None:
        """The choice with which at least `missing` bytes stay free, which closed forms lack; None: there is none."""
        if not self._is_open or self._request.objective == "memory":
            return None
        found = self._least_of(of, min(_SHARE, 1 - missing / self._request.memory_bytes))
        return None if found is None else self._choice(of, found, self._bytes_beside.of(of), None)

    @property
    def _is_open(self) -> bool:
        """Whether stages may recompute what they need to."""
        return "recompute" not in self._request.fixed and self._request.fixed.get("offload") is None

    def offloaded(self, of: Configuration, *, every: bool = False) -> dict[tuple[Recompute, ...], list[Choice]]:
        """For each recomputation with which not all activations fit, choices that keep as many as fit by closed forms.

        It ends with the least recomputation with which all activations fit, which has no choices: with more, offload
        would save nothing.

        Args:
            of: as for `found`.
            every: whether to return those that keep fewer too.
        """
        if not self._offloads:
            return {}
        key = of, every
        if key not in self._offloaded:
            self._offloaded[key] = self._find_offloaded(of, every)
        return self._offloaded[key]

    def _find_offloaded(self, of: Configuration, every: bool) -> dict[tuple[Recompute, ...], list[Choice]]:
        beside, found = self._bytes_beside.of(of), dict[tuple[Recompute, ...], list[Choice]]()
        smallest, lowest = self._request.objective == "memory", lowest_cap(self._shape.of)
        most = self._request.memory_bytes
        for recompute in self._offloadable if not smallest else self.uniform()[0 if every else -1 :]:
            number = 0 if smallest else self._room.number(beside, recompute, self._share * most)
            if number is None:
                found[recompute] = []
                break
            numbers = [0] if smallest else []
            if every:
                numbers = list(range(most_live(self._shape.of) - 1, lowest - 1, -1))
            elif not smallest and self._room.least(beside, recompute) <= most:
                numbers = [max(number, lowest)]
            if numbers:
                found[recompute] = [self._choice(of, recompute, beside, each) for each in numbers]
        return found

    @cached_property
    def _offloadable(self) -> list[tuple[Recompute, ...]]:
        """The choices in `uniform` that keep clearly fewer bytes than all those with less recomputation."""
        found: list[tuple[Recompute, ...]] = []
        least = inf
        for recompute in self.uniform():
            size = sum(self._kept[kind][stage] for stage, kind in enumerate(recompute))
            if size < _FEWER * least:
                found.append(recompute)
                least = size
        return found

    def uniform(self) -> list[tuple[Recompute, ...]]:
        """The same kind for all stages, the least recomputation first; of fixed kinds, those of the stages."""
        stages, given = self._shape.placement.num_stages, self._request.fixed.get("recompute")
        if given is None:
            return [(kind,) * stages for kind in self._kinds]
        kinds = tuple(map(Recompute, given))
        return [kinds * stages] if len(kinds) == 1 else [kinds] if len(kinds) == stages else []

    def _fullest(self, rank: int, beside: Beside, recompute: Sequence[Recompute]) -> tuple[int, float]:
        """The moment at which a rank holds most, and its bytes."""
        most, at = -inf, 0
        kept, stages = self._kept, beside.stages
        for number, moment in enumerate(self._moments[rank]):
            size = beside.at(rank, number, recompute)
            for stage, count in moment.live.items():
                size += count * kept[recompute[stage]][stage]
            for stage, count in moment.waiting.items():
                size += count and count * stages[stage].waiting(recompute[stage])
            if size > most:
                most, at = size, number
        return at, most

    def _bytes(self, beside: Beside, recompute: tuple[Recompute, ...]) -> Iterator[float]:
        """Peak bytes of every rank."""
        for sizes, activations in zip(beside.of(recompute), self._activations(beside, recompute), strict=True):
            yield max(map(add, sizes, activations), default=-inf)

    def _activations(self, beside: Beside, recompute: tuple[Recompute, ...]) -> list[list[float]]:
        """Bytes of activations of each rank at its moments, with any data strategy."""
        if recompute not in self._of_recompute:
            kept = [self._kept[kind][stage] for stage, kind in enumerate(recompute)]
            waiting = [beside.stages[stage].waiting(kind) for stage, kind in enumerate(recompute)]
            self._of_recompute[recompute] = [
                [
                    sum(count * kept[stage] for stage, count in moment.live.items())
                    + sum(count * waiting[stage] for stage, count in moment.waiting.items())
                    for moment in of_rank
                ]
                for of_rank in self._moments
            ]
        return self._of_recompute[recompute]

    def _choice(
        self, of: Configuration, recompute: tuple[Recompute, ...], beside: Beside, offload: int | None
    ) -> Choice:
        of = of._replace(recompute=recompute, offload=offload)
        if offload is None:
            least = max(self._bytes(beside, recompute))
        else:
            least = self._room.least(beside, recompute)
        limit = None
        if schedules.find(of.schedule).to_measure and self._request.memory_bytes < inf:
            share = max(
                sum(self._kept[recompute[stage]][stage] for stage in moments[0].live) for moments in self._moments
            )
            gradients = NumberBytes.of(of.precision).gradient
            parameters = max(self._costs.held_parameters(of, held) for held in self._shape.placement.stages_of)
            always = (state_bytes_per_parameter(of) + gradients) * parameters
            limit = max(0.0, self._request.memory_bytes - always) / share if share else None
        return Choice(of=of, schedule_limit=limit, least_bytes=least)

    def _least_of(self, of: Configuration, share: float) -> tuple[Recompute, ...] | None:
        """The least recomputation that fits into a share of the memory; None where nothing does."""
        return self._least(self._bytes_beside.of(of), share * self._request.memory_bytes)

    def _least(self, beside: Beside, most: float) -> tuple[Recompute, ...] | None:
        """The least recomputation that fits into so many bytes; None where nothing does."""
        kinds, stages = self._kinds, self._shape.placement.num_stages
        sizes = list(self._bytes(beside, (kinds[0],) * stages))
        if max(sizes) <= most:
            return (kinds[0],) * stages
        if max(self._bytes(beside, (kinds[-1],) * stages)) > most:
            return None
        chosen = [0] * stages
        for rank, size in enumerate(sizes):
            best = self._of_rank(rank, beside, most) if size > most else {}
            if best is None:  # which fits, as it was seen
                return (kinds[-1],) * stages
            for stage, number in best.items():
                chosen[stage] = max(chosen[stage], number)
        return tuple(kinds[number] for number in chosen)

    def _of_rank(self, rank: int, beside: Beside, most: float) -> dict[int, int] | None:
        """The least recomputation of a rank by stage, as a number of a kind; None where nothing fits."""
        kinds = self._kinds
        recompute = [kinds[0]] * self._shape.placement.num_stages
        seconds = self._seconds
        extra = {kind: list(map(sub, seconds[kind], seconds[kinds[0]])) for kind in kinds}
        needed: dict[int, dict[int, int]] = {}  # by moment, the number of each stage's kind
        rooms = dict[int, float]()
        for _ in range(_TRIES):
            at, held = self._fullest(rank, beside, recompute)
            if held <= most:
                return {stage: kinds.index(recompute[stage]) for stage in self._shape.placement.stages_of[rank]}
            moment = self._moments[rank][at]
            rooms[at] = rooms[at] - (held - most) if at in rooms else most
            others = [each for other, each in needed.items() if other != at]
            least = {stage: max((each.get(stage, 0) for each in others), default=0) for stage in moment.live}
            inside = {kind: beside.at(rank, at, (kind,) * len(recompute)) for kind in kinds}
            items = [
                [
                    (
                        extra[kind][stage],
                        n * self._kept[kind][stage]
                        + moment.waiting.get(stage, 0) * beside.stages[stage].waiting(kind)
                        + (inside[kind] if stage == moment.stage else 0.0),
                    )
                    for kind in kinds[least[stage] :]
                ]
                for stage, n in moment.live.items()
            ]
            best = knapsack(items, rooms[at])
            if best is None:
                return None
            needed[at] = {stage: number + least[stage] for stage, number in zip(moment.live, best, strict=True)}
            for stage in self._shape.placement.stages_of[rank]:
                recompute[stage] = kinds[max(each.get(stage, 0) for each in needed.values())]
        return None
