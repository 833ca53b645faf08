"""Exact earliest start times of every action of a schedule or program, in one pass over its dependencies."""

from __future__ import annotations

from pipeloom.ir.action import Action, Op
from pipeloom.ir.schedule import Program, Schedule, walk
from pipeloom.sim.costs import Costs, Network
from pipeloom.sim.timeline import Span, Timeline, build_timeline

_SEND_F, _SEND_B, _RECV_F, _RECV_B, _REDUCE_GRAD = Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B, Op.REDUCE_GRAD


def simulate(pipeline: Schedule | Program, costs: Costs, network: Network | None = None) -> Timeline:
    """When every action runs if each starts as soon as its rank is free and its dependencies have ended.

    * In a `Schedule`, a value that comes from another rank arrives its latency after the computation has ended.
    * In a `Program`, sends keep their rank busy for `Network.send_seconds` and wait for nobody; a receive lasts from
      the moment its rank comes to it until the message, sent `latency_seconds` before, is there.
    * An overlapped F and B start once both are ready, and both results are there when the unit ends; its time is
      drawn as F followed by B, in proportion.
    * REDUCE_GRAD lasts from the moment a rank comes to it until what all members of its group sent when they came is
      there.

    Args:
        pipeline: a legal schedule or program (`pipeloom.ir.check` proves that).
        costs: seconds of the computations.
        network: seconds of the messages; none if not given.

    Raises:
        ScheduleError: the actions wait for each other in a circle.
        InputError: the costs or latencies are for another number of stages, slices or ranks.
    """
    network = network or Network()
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    seconds, factors = costs.seconds(schedule), costs.factors(schedule)
    latency = network.latency(schedule.num_ranks)
    clock = [0.0] * schedule.num_ranks
    spans: list[list[Span]] = [[] for _ in clock]
    ended: dict[Action, tuple[int, float]] = {}
    meetings = _meetings(pipeline)
    meeting_starts: dict[tuple[int, ...], list[tuple[int, float]]] = {}  # when each member came
    partners = schedule.partners
    unit_ends: dict[Action, float] = {}  # of the second members that are to come
    for rank, action, needs in walk(pipeline):
        free = ready = clock[rank]
        for need in needs:
            source, end = ended[need]
            if source != rank:
                end += latency[source][rank]
            if end > ready:
                ready = end
        stage, op, _, _ = action
        if op is _SEND_F or op is _SEND_B:
            end = ready + network.send_seconds
        elif op is _RECV_F or op is _RECV_B:
            ready, end = free, ready + network.receive_seconds
        elif op is _REDUCE_GRAD and stage in meetings:
            # The walk lets the first member through when all have come, so every member's clock is known here.
            group, members = meetings[stage]
            if group not in meeting_starts:
                meeting_starts[group] = [(member, clock[member]) for member in members]
            arrivals = (
                came + (latency[member][rank] if member != rank else 0.0) for member, came in meeting_starts[group]
            )
            end = max(arrivals) + seconds[op][stage]
        elif action in partners:  # the walk lets it through when both are ready
            partner = partners[action]
            own = costs.overlap * seconds[op][stage]
            end = ready + own
            unit_ends[partner] = end + costs.overlap * seconds[partner.op][partner.stage]
            ended[action] = (rank, unit_ends[partner])
        elif action in unit_ends:
            end = unit_ends.pop(action)
        elif op in factors:
            end = ready + seconds[op][stage] * factors[op][action.slice or 0]
        else:
            end = ready + seconds[op][stage]
        clock[rank] = end
        ended.setdefault(action, (rank, end))
        spans[rank].append(Span(action, ready, end))
    keeps = costs.bytes_kept(schedule)
    return build_timeline(schedule, spans, name=pipeline.name, kind="simulated", keeps=keeps)


def _meetings(pipeline: Schedule | Program) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """For each stage whose gradients are summed over several ranks, its group and those ranks."""
    if not isinstance(pipeline, Program):
        return {}
    return {stage: (group, pipeline.ranks_of_group(group)) for group in pipeline.gradient_groups for stage in group}
