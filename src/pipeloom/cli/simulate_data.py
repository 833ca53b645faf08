"""Data parallelism and activation offload in `pipeloom simulate`: options, links and numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pipeloom.cli.common.files import read_json
from pipeloom.cli.common.parser import Parser
from pipeloom.common.quantities import Bytes, BytesPerSecond
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Program, Schedule
from pipeloom.passes import insert_offload, lower
from pipeloom.plan.cluster import data_links, parse_cluster
from pipeloom.sim import Costs, Network, Timeline
from pipeloom.sim.background import LINKS
from pipeloom.sim.costs import MOST_UNITS

_OF_DATA = (
    "data_strategy",
    "data_granularity",
    "data_bandwidth",
    "data_sum_bandwidth",
    "data_latency",
    "data_slowdown",
    "units",
)
_SIZES = ("parameter_bytes", "activation_bytes")


def add_options(parser: Parser) -> None:
    """Add the options to the parser."""
    option, rate, size = parser.add_argument, BytesPerSecond, Bytes
    strategies, granularities = ([each.value for each in kind] for kind in (DataStrategy, Granularity))
    option("--data", type=int, help="data-parallel degree; micro-batches are per replica (no data parallelism)")
    option("--data-strategy", choices=strategies, help="sharding strategy (ddp)")
    option("--data-granularity", choices=granularities, help="frequency of all-gathers and reductions (step)")
    option("--data-bandwidth", type=rate, help="bandwidth per rank to other replicas (no limit)")
    option("--data-sum-bandwidth", type=rate, help="bandwidth per rank of gradient reductions (--data-bandwidth)")
    option("--data-latency", type=float, help="latency of a message between replicas in seconds (0)")
    option("--data-slowdown", type=float, help="slowdown of computations during collectives, 0 to 1 (0)")
    option("--units", type=int, help="units per stage, gathered and reduced one by one (1)")
    option("--cluster", type=str, help="JSON file with bandwidths and latencies for --data and --offload")
    option("--parameter-bytes", type=size, help="bytes of parameters per rank")
    option("--offload", type=float, help="activations kept per rank; the others are offloaded (no offload)")
    option("--memory-bandwidth", type=rate, help="bandwidth to the offload target (no limit)")
    option("--activation-bytes", type=size, help="bytes of activations per rank and micro-batch")


def check_options(options: Any) -> None:
    """Validate options that need or exclude each other.

    Raises:
        InputError: an option without the option it needs, or beside one that it contradicts.
    """
    for names, needed in ((_OF_DATA, "data"), (("memory_bandwidth",), "offload")):
        given = next((name for name in names if getattr(options, name) is not None), None)
        if given is not None and getattr(options, needed) is None:
            raise InputError(f"{_flag(given)} has no effect without --{needed}. Add --{needed}, or remove it.")
    if options.cluster is not None and options.data is None and options.offload is None:
        raise InputError("--cluster has no effect without --data or --offload. Add one of them, or remove it.")
    for name in _SIZES:
        if getattr(options, name) is not None and options.costs is not None:
            raise InputError(
                f"{_flag(name)} with --costs: the file has a value for every stage. Remove one of the two."
            )
    if options.units is not None:
        if options.costs is not None:
            raise InputError("--units with --costs: the file has a value for every stage. Remove one of the two.")
        if not 1 <= options.units <= MOST_UNITS:
            raise InputError(f"--units {options.units}: must be from 1 to {MOST_UNITS}.")
    if options.offload is not None and not options.offload > 0:
        raise InputError(f"--offload {options.offload:g}: must be more than 0.")


def program_of(schedule: Schedule, options: Any) -> Schedule | Program:
    """The schedule or program to simulate, with data parallelism, offload and the updates of a stream.

    Updates take no time where stages have no replicas, so a large stream is simulated without them.
    """
    if options.data is None and options.offload is None:
        stream = schedule.microbatches_per_update is not None
        replicated = any(len(ranks) > 1 for ranks in schedule.placement.replicas)
        return lower(schedule) if stream and (replicated or not schedule.large) else schedule
    data = None
    if options.data is not None:
        data = DataAxis(
            degree=options.data,
            strategy=DataStrategy(options.data_strategy or DataStrategy.DDP),
            granularity=Granularity(options.data_granularity or Granularity.STEP),
        )
    program = lower(schedule, data=data)
    return program if options.offload is None else insert_offload(program, options.offload)


def costs_of(schedule: Schedule, costs: Costs, options: Any) -> Costs:
    """`costs` with the sizes from the options, equal for all stages."""
    sizes: dict[str, Any] = {
        name: (getattr(options, name) * schedule.stage_share,) * schedule.num_stages
        for name in _SIZES
        if getattr(options, name) is not None
    }
    if options.units is not None:
        sizes["units"] = (options.units,) * schedule.num_stages
    return replace(costs, **sizes)


def network_of(network: Network, options: Any) -> Network:
    """`network` with the links of data parallelism and offload; options override the cluster and costs file.

    Raises:
        InputError: the cluster file cannot be read.
    """
    if options.cluster is not None:
        cluster = read_json("--cluster", options.cluster, parse_cluster)
        found = data_links(cluster, devices=options.ranks, replicas=options.data or 1)
        used = {"data": options.data is not None, "memory": options.offload is not None}
        network = replace(network, **{name: value for name, value in found.items() if used[name.split("_")[0]]})
    given = {
        "data_bytes_per_second": options.data_bandwidth,
        "data_sum_bytes_per_second": options.data_sum_bandwidth,
        "data_latency_seconds": options.data_latency,
        "data_slowdown": options.data_slowdown,
        "memory_bytes_per_second": options.memory_bandwidth,
    }
    return replace(network, **{name: value for name, value in given.items() if value is not None})


def numbers(pipeline: Schedule | Program, timeline: Timeline) -> dict[str, Any]:
    """The numbers of data parallelism and offload for ``--json``; empty without either."""
    answer: dict[str, Any] = {}
    if isinstance(pipeline, Program) and pipeline.data is not None:
        data = pipeline.data
        answer["data"] = {
            "degree": data.degree,
            "strategy": data.strategy.value,
            "granularity": data.granularity.value,
        }
    for link in timeline.links:
        answer[f"{link}_link_seconds"] = [
            math.fsum(end - start for (_, op, _, _), start, end in row if LINKS[op] == link)
            for row in timeline.background
        ]
    if timeline.background and timeline.peak_bytes is not None:
        answer["peak_bytes"] = list(timeline.peak_bytes)
    return answer


def notes(name: str, answer: dict[str, Any], makespan: float) -> list[str]:
    """The numbers of `numbers` as lines of text."""
    lines = []
    if "data" in answer:
        data = answer["data"]
        lines.append(f"{name}: {data['degree']} replicas, {data['strategy']}, granularity {data['granularity']}")
    for link, where in (("data", "to other replicas"), ("memory", "to the offload target")):
        if seconds := answer.get(f"{link}_link_seconds"):
            busiest = max(seconds)
            lines.append(f"{name}: a link {where} is busy for up to {busiest:.6g} s of {makespan:.6g} s")
    return lines


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
