"""``pipeloom simulate --lose RANK:REPLICA``: a step without one rank, by its peers and by fewer replicas."""

import re
from argparse import Namespace
from typing import Any

from pipeloom.cli.simulation.inputs import Inputs
from pipeloom.common.quantities import percent_text
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Schedule
from pipeloom.sim import simulate
from pipeloom.sim.lost_rank import simulate_rerouted

_MORE_MICROBATCHES = 64  # tried, where a schedule does not run with the least number


def lost_answer(name: str, schedule: Schedule, inputs: Inputs) -> dict[str, Any]:
    """The numbers of ``--json`` about a lost rank; empty without the option.

    Raises:
        InputError: there is no such rank, no peer, or the schedule is asynchronous.
    """
    options = inputs.options
    if options.lose is None:
        return {}
    match = re.fullmatch(r"(\d+):(\d+)", options.lose, re.ASCII)
    if match is None:
        raise InputError(f"--lose {options.lose}: must be RANK:REPLICA, such as 2:1.")
    if options.data is None:
        raise InputError(f"--lose {options.lose}: has no effect without --data. Add --data with 2 replicas or more.")
    lost = int(match[1]), int(match[2])
    costs = inputs.costs_of(schedule)
    found, split = (
        simulate_rerouted(schedule, costs, inputs.network, data=options.data, lost=lost, split=split)
        for split in (False, True)
    )
    answer: dict[str, Any] = {
        "rank": lost[0],
        "replica": lost[1],
        "whole_seconds": found.whole_seconds,
        "rerouted_seconds": found.seconds,
        "rerouted_in_bubbles": found.in_bubbles,
        "rerouted_peak_activations": found.peak_activations,
        "whole_peak_activations": found.whole_peak_activations,
        "split_seconds": split.seconds,
        "split_in_bubbles": split.in_bubbles,
    }
    return {"lost": answer | _fewer_replicas(name, inputs)}


def _fewer_replicas(name: str, inputs: Inputs) -> dict[str, Any]:
    """A step of one replica less: with as many micro-batches in all, or a few more where the schedule needs that."""
    options = inputs.options
    least = -(-options.data * options.microbatches // (options.data - 1))
    for count in range(least, least + _MORE_MICROBATCHES):
        other = Inputs(Namespace(**{**vars(options), "microbatches": count}))
        try:
            schedule = other.schedule(name)[0]
        except ScheduleError:
            continue
        seconds = simulate(schedule, other.costs_of(schedule), other.network).makespan
        return {"fewer_replicas_seconds": seconds, "fewer_replicas_microbatches": count}
    return {}


def print_lost(answer: dict[str, Any]) -> None:
    """Print `lost_answer`."""
    if (lost := answer.get("lost")) is None:
        return
    name, whole = answer["schedule"], lost["whole_seconds"]

    def step(seconds: float) -> str:
        return f"{seconds:.6g} s per step, {seconds / whole:.2f} times that of all ranks"

    rows = (
        (
            f"without rank {lost['rank']} of replica {lost['replica']}, its micro-batches on its peers: "
            f"{step(lost['rerouted_seconds'])}; {percent_text(lost['rerouted_in_bubbles'])} of them in bubbles; "
            f"peak activations of a peer {lost['rerouted_peak_activations']:g} in place of "
            f"{lost['whole_peak_activations']:g}"
        ),
        (
            f"the same with each backward as I and W: {step(lost['split_seconds'])}; "
            f"{percent_text(lost['split_in_bubbles'])} of them in bubbles"
        ),
    )
    for row in rows:
        print(f"{name}: {row}")
    if (fewer := lost.get("fewer_replicas_seconds")) is not None:
        count = lost["fewer_replicas_microbatches"]
        print(f"{name}: without replica {lost['replica']}, {count} micro-batches on each other one: {step(fewer)}")
