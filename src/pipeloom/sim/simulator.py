"""Exact earliest start times of every action of a schedule or program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.ir.check.checker import explained
from pipeloom.ir.large.proof import proof_of
from pipeloom.ir.schedule import Program, Schedule, schedule_of
from pipeloom.sim.build import build_timeline
from pipeloom.sim.costs import Costs
from pipeloom.sim.events import spans_by_events
from pipeloom.sim.network import Network
from pipeloom.sim.timeline import Timeline

if TYPE_CHECKING:
    from pipeloom.ir.large.columns import Proof


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

    A large schedule without bandwidths and slice factors is timed by arrays, with the same numbers.

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
        return _simulate(pipeline, schedule, costs, network)


def _simulate(pipeline: Schedule | Program, schedule: Schedule, costs: Costs, network: Network) -> Timeline:
    if pipeline is schedule and not network.limited and costs.slice_factors is None:
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
        background=found.background,
        waits=found.waits,
        transfers=tuple(found.transfers),
        latency_seconds=network.latency_seconds,
        weight_version_bytes=costs.version_bytes(schedule),
    )


def _timed_by_rounds(schedule: Schedule, proof: Proof, costs: Costs, network: Network) -> Timeline:
    from pipeloom.sim.levels import byte_curves, live_curves, spans_by_rounds

    rows = spans_by_rounds(schedule, proof, costs, network)
    keeps = costs.bytes_kept(schedule)
    return Timeline(
        name=schedule.name,
        kind="simulated",
        spans=rows,
        memory=live_curves(schedule, proof, rows),
        ideal_seconds=sum(row.busy for row in rows) / schedule.num_ranks,
        placement=schedule.placement,
        num_microbatches=schedule.num_microbatches,
        num_slices=schedule.num_slices,
        memory_bytes=None if keeps is None else byte_curves(schedule, proof, rows, *keeps),
        overlapped=schedule.overlapped,
        latency_seconds=network.latency_seconds,
        weights=schedule.weights,
        microbatches_per_update=schedule.microbatches_per_update,
        weight_version_bytes=costs.version_bytes(schedule),
    )
