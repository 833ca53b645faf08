"""Exact earliest start times of every action of a schedule or program, and timelines of simulated and measured runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from pipeloom.errors import InputError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.check.checker import explained
from pipeloom.ir.schedule import Program, Schedule, schedule_of
from pipeloom.ir.walk import in_background, proof_of
from pipeloom.sim.costs import Costs
from pipeloom.sim.events import Transfer, spans_by_events
from pipeloom.sim.network import Network
from pipeloom.sim.spans import Collective, Span
from pipeloom.sim.timeline import Timeline, of_schedule

if TYPE_CHECKING:
    from pipeloom.ir.large.columns import Proof

_Moments = Sequence[Sequence[tuple[float, float]]]  # starts and ends
_AT_ONCE = {Op.OFFLOAD: 0, Op.RELOAD: 2}  # at the same time, ends of OFFLOAD come first and starts of RELOAD last


def simulate(pipeline: Schedule | Program, costs: Costs, network: Network | None = None) -> Timeline:
    """Simulate a step in which every action starts once its rank is free and its dependencies have ended.

    * In a `Schedule`, a value from another rank arrives its latency after the end of the computation.
    * In a `Program`, a send keeps its rank busy for `Network.send_seconds`; a receive lasts until the message, sent
      `latency_seconds` before, has arrived.
    * A link with a bandwidth transfers one message at a time, see `Network`.
    * An overlapped F and B start once both are ready; both results are available at the end of the unit. Its time is
      shown as F followed by B, in proportion.
    * The STEP of a stage with replicas waits for the REDUCE_GRAD of all replicas.
    * REDUCE_GRAD of shared parameters ends once the messages of all ranks of its group have arrived.
    * All-gathers and reductions of a data axis and offloading overlap with computation, see `pipeloom.sim.background`;
      the step ends with the last of them.

    A large schedule without bandwidths, slice factors and `action_seconds` is timed by arrays, with the same numbers.

    Args:
        pipeline: a legal schedule or program, see `pipeloom.ir.check`.
        costs: seconds of the computations, bytes of memory and messages.
        network: latencies and bandwidths; default: messages take no time.

    Raises:
        ScheduleError: the actions wait for each other in a circle.
        InputError: costs, latencies or links for a wrong number of stages or ranks, or links with a bandwidth but no
            `message_bytes`.
    """
    network = network or Network()
    schedule = schedule_of(pipeline)
    with explained(pipeline):
        if pipeline is schedule and not network.limited and costs.slice_factors is None and not costs.action_seconds:
            proof = proof_of(schedule)
            if proof is not None:
                return _timed_by_rounds(schedule, proof, costs, network)
        found = spans_by_events(pipeline, costs, network)
        return build_timeline(
            schedule,
            found.spans,
            name=pipeline.name,
            kind="simulated",
            keeps=costs.bytes_kept(schedule),
            background=found.background.spans,
            waits=found.waits,
            transfers=tuple(found.transfers),
            latency_seconds=network.latency_seconds,
            weight_version_bytes=costs.version_bytes(schedule),
        )


class StepSeconds(NamedTuple):
    """What takes how long in a step.

    Attributes:
        makespan: of the step.
        ideal: mean of the ranks, of their computations without what they wait for.
        busy: for each rank, of its computations, and for each of its links, of its transfers.
        outside: for each of these, from the beginning of the step to the first one, and from the last one to the end.
    """

    makespan: float
    ideal: float
    busy: tuple[float, ...]
    outside: tuple[float, ...]

    @classmethod
    def of(cls, timeline: Timeline) -> Self:
        """The seconds of a timeline, without its links."""
        ranks = [[(start, end) for (_, op, _, _), start, end in row if op in COMPUTE_OPS] for row in timeline.spans]
        return cls.found(timeline.makespan, ranks, timeline.waits or (0.0,) * len(ranks), ())

    @classmethod
    def found(cls, makespan: float, ranks: _Moments, waits: Sequence[float], transfers: _Moments) -> Self:
        """From the starts and ends of computations of each rank, the seconds that they wait, and transfers of links."""
        busy, outside = list[float](), list[float]()
        for row, wait in (*zip(ranks, waits, strict=True), *((row, 0.0) for row in transfers)):
            busy.append(math.fsum(end - start for start, end in row) - wait)
            outside.append(row[0][0] + makespan - row[-1][1] if row else makespan)
        return cls(makespan, math.fsum(busy[: len(waits)]) / len(waits), tuple(busy), tuple(outside))


def simulate_seconds(program: Program, costs: Costs, network: Network) -> StepSeconds:
    """The seconds of `simulate`, in less time: no curves are made.

    Raises:
        ScheduleError, InputError: as `simulate`.
    """
    with explained(program):
        found = spans_by_events(program, costs, network)
    ends = [*(end for rank in found.ranks for end in rank.ends[-1:]), *found.background.ends]
    ranks = [rank.computations for rank in found.ranks]
    return StepSeconds.found(max(ends, default=0.0), ranks, found.waits, found.background.transfers)


def _ideal_seconds(spans: Sequence[Sequence[Span]], waits: Sequence[float]) -> float:
    """Mean seconds that ranks compute."""
    busy = math.fsum(end - start for row in spans for (_, op, _, _), start, end in row if op in COMPUTE_OPS)
    return (busy - math.fsum(waits)) / len(spans)


def _timed_by_rounds(schedule: Schedule, proof: "Proof", costs: Costs, network: Network) -> Timeline:
    from pipeloom.sim.large_schedules import byte_curves, live_curves, spans_by_rounds

    rows = spans_by_rounds(schedule, proof, costs, network)
    keeps = costs.bytes_kept(schedule)
    return Timeline(
        name=schedule.name,
        kind="simulated",
        spans=rows,
        memory=live_curves(schedule, proof, rows),
        ideal_seconds=sum(row.busy for row in rows) / schedule.num_ranks,
        memory_bytes=None if keeps is None else byte_curves(schedule, proof, rows, *keeps),
        latency_seconds=network.latency_seconds,
        weight_version_bytes=costs.version_bytes(schedule),
        **of_schedule(schedule),
    )


def build_timeline(
    schedule: Schedule,
    spans: Sequence[Sequence[Span]],
    *,
    name: str,
    kind: Literal["simulated", "measured"],
    background: Sequence[Sequence[Span]] = (),
    waits: Sequence[float] = (),
    keeps: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
    transfers: tuple[Transfer, ...] = (),
    latency_seconds: float | tuple[tuple[float, ...], ...] = 0.0,
    weight_version_bytes: tuple[float, ...] | None = None,
) -> Timeline:
    """A timeline from the spans of a run of `schedule`; memory and ideal time follow from them.

    `background` has overlapped transfers and `waits` the seconds that computations waited inside, both per rank.
    `keeps` has, per stage, the bytes of one action from F on, and the bytes that are left after I.
    """
    beside = tuple(map(tuple, background)) if any(background) else ()
    both = [(*row, *more) for row, more in zip(spans, beside, strict=True)] if beside else spans
    ones, share = (1,) * schedule.num_stages, schedule.stage_share / schedule.num_slices
    return Timeline(
        name=name,
        kind=kind,
        spans=tuple(map(tuple, spans)),
        background=beside,
        memory=tuple(_curve(schedule, row, ones, ones, share) for row in both),
        waits=tuple(waits) if any(waits) else (),
        ideal_seconds=_ideal_seconds(spans, waits),
        memory_bytes=None if keeps is None else tuple(_curve(schedule, row, *keeps) for row in both),
        transfers=transfers,
        latency_seconds=latency_seconds,
        weight_version_bytes=weight_version_bytes,
        **of_schedule(schedule),
    )


def measured_timeline(
    pipeline: Schedule | Program,
    records: Sequence[Sequence[tuple[Action, float, float]]],
    *,
    name: str | None = None,
    waits: Sequence[float] = (),
    collectives: Sequence[Sequence[tuple[str, str, float, float, int]]] = (),
) -> Timeline:
    """The timeline of a measured step.

    Args:
        pipeline: the schedule or program that ran.
        records: for each rank, ``(action, start, end)`` in execution order, in seconds of one clock.
        name: the name of the timeline; default: the schedule's.
        waits: for each rank, the seconds that its computations waited inside.
        collectives: for each rank, `Collective`s inside its actions, on the same clock.

    Time 0 is the first start of a computation or an overlapped transfer on any rank.

    Raises:
        InputError: records of some ranks are missing.
    """
    schedule = schedule_of(pipeline)
    if len(records) != schedule.num_ranks:
        raise InputError(
            f"records of {len(records)} ranks: must have one entry for each of {schedule.num_ranks} ranks."
        )
    begun = (
        start
        for row in records
        for action, start, _ in row
        if action.op in COMPUTE_OPS or in_background(action, schedule)
    )
    zero = min(begun, default=0.0)
    spans = [[Span(action, max(0.0, at - zero), max(0.0, end - zero)) for action, at, end in row] for row in records]
    rows = [[span for span in row if not in_background(span.action, schedule)] for row in spans]
    beside = [[span for span in row if in_background(span.action, schedule)] for row in spans]
    for row in beside:
        row.sort(key=itemgetter(1, 2))
    made = build_timeline(schedule, rows, name=name or schedule.name, kind="measured", background=beside, waits=waits)
    inside = tuple(
        tuple(Collective(axis, kind, at - zero, end - zero, size) for axis, kind, at, end, size in row if at >= zero)
        for row in collectives
    )
    return replace(made, collectives=inside if any(inside) else ())


def _curve(
    schedule: Schedule, row: Sequence[Span], whole: Sequence[float], left: Sequence[float], unit: float = 1.0
) -> tuple[tuple[float, float], ...]:
    """Change points of what a rank keeps of the stages' activations, in multiples of `unit`.

    F and RELOAD take all of `whole` at their start. At their end, I frees all but `left`, W frees `left`, and B and
    OFFLOAD free all.
    """
    changes: list[tuple[float, int, float]] = []
    for (stage, op, _, _), start, end in row:
        if op is Op.F or op is Op.RELOAD:
            changes.append((start, _AT_ONCE.get(op, 1), whole[stage]))
        if op is Op.B or op is Op.OFFLOAD or (op is Op.F and schedule.forward_only):
            freed = whole[stage]
        elif op is Op.I:
            freed = whole[stage] - left[stage]
        else:
            freed = left[stage] if op is Op.W else 0
        if freed:
            changes.append((end, _AT_ONCE.get(op, 1), -freed))
    held, points = 0.0, [(0.0, 0.0)]
    for at, _, change in sorted(changes, key=itemgetter(0, 1)):
        held += change
        points.append((at, held * unit))
    return tuple(points)
