"""The inputs of `pipeloom simulate`: schedules, costs, links and memory from the options and the files they name."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import Any, cast

from pipeloom import schedules
from pipeloom.cli.simulation.checks import LINKS, SIZES, TIMES, check_options
from pipeloom.cli.simulation.model import SimulatedModel
from pipeloom.common.json_reader import parse_file
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Op, Placement, Program, Schedule
from pipeloom.passes import insert_offload, lower
from pipeloom.plan.costs.links import data_links
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.schedules import Conditions, Found, StreamOptions
from pipeloom.schedules.conditions import peak_held
from pipeloom.schedules.sizes import check_sizes
from pipeloom.sim import Costs, CostsFile, Network, Timeline, parse_costs, simulate


class Inputs:
    """The options of one call, validated.

    Attributes:
        options: the parsed command line.
        costs, network: times of computations and messages.
        file: the costs file, if given.
        model: the transformer of ``--model``, if given.

    Raises:
        InputError: a file cannot be read, an option is out of range, or options exclude each other.
    """

    def __init__(self, options: Any) -> None:
        check_options(options)
        self.options = options
        self.file: CostsFile | None = None
        self.model = None if options.model is None else SimulatedModel(options)
        slowness = _slowness(options.slow_rank, options.ranks)
        if self.model is not None:
            costs, network = Costs.uniform(), self.model.network
        elif options.costs is None:
            network = Network(latency_seconds=options.latency or 0.0)
            times = ((name, getattr(options, name)) for name in TIMES)
            costs = Costs.uniform(**{name: seconds for name, seconds in times if seconds is not None})
        else:
            self.file = parse_file("--costs", options.costs, parse_costs)
            costs, network = self.file.costs, self.file.network
            if options.weight_gradient_memory is not None and costs.activation_bytes is not None:
                raise InputError(
                    f"--weight-gradient-memory {options.weight_gradient_memory:g}: does not work with --costs "
                    f"{options.costs}, whose stages have activation_bytes. Remove the option, and set "
                    "weight_gradient_bytes of each stage in the file."
                )
        self.costs = replace(costs, overlap=options.overlap, rank_slowness=slowness)
        if options.cluster is not None and self.model is None:
            cluster = find_cluster(options.cluster, "--cluster")
            found = data_links(cluster, stride=options.ranks, replicas=options.data or 1)
            used = {"data": options.data is not None, "memory": options.offload is not None}
            network = replace(network, **{name: value for name, value in found.items() if used[name.split("_")[0]]})
        links = {name: getattr(options, option) for option, name in LINKS.items()}
        self.network = replace(network, **{name: value for name, value in links.items() if value is not None})

    def schedule(self, name: str) -> tuple[Schedule, Found | None]:
        """The schedule `name`, and the result of the search if it was searched.

        Raises:
            ScheduleError, InputError: an unknown name, or sizes that the schedule does not support.
        """
        options, chunks, stream = self.options, self.options.chunks, self._stream(name)
        sizes = {"num_ranks": options.ranks, "num_microbatches": options.microbatches}
        if schedules.is_file(name):
            check_sizes(options.ranks, options.microbatches, 1 if chunks is None else chunks)
            return schedules.build(name, **sizes, num_chunks=chunks, **stream), None
        family = schedules.find(name)
        family.check_stream(stream)
        least = 2 if name == "search" and options.placement == "v" else 1  # a V needs two virtual stages per rank
        if chunks is None and family.chunks is None and self.file is not None and options.ranks > 0:
            chunks = max(least, self.file.num_stages // options.ranks)
        if chunks is None:
            chunks = max(least, family.default_chunks)
        slices = options.slices if family.sliced or options.names[0] != "compare" else 1
        check_sizes(options.ranks, options.microbatches, chunks, slices, most=family.most_actions)
        if name == "search":
            if slices > 1:
                raise InputError(f"{slices} slices: search does not slice sequences. Use 1 slice, or schedule seq1f1b.")
            return self._search((Placement.v if options.placement == "v" else Placement.loop)(options.ranks, chunks))
        measured = self.conditions(Placement.loop(options.ranks, chunks), name) if family.to_measure else None
        return family(**sizes, num_chunks=chunks, num_slices=slices, conditions=measured, **stream), None

    def _stream(self, name: str) -> StreamOptions:
        """The options of a stream. When comparing, an option goes to the schedules that support it, if any does."""

        def supported(schedule: str) -> set[str]:
            return set() if schedules.is_file(schedule) else set(schedules.find(schedule).options)

        options = self.options
        given = {what: getattr(options, what) for what in ("weights", "microbatches_per_update", "in_flight")}
        if given["in_flight"] is not None and re.fullmatch(r"\d+", given["in_flight"], re.ASCII):
            given["in_flight"] = int(given["in_flight"])
        given["replicas"] = None
        if options.replicas is not None:
            if re.fullmatch(r"\d+(,\d+)*", options.replicas, re.ASCII) is None:
                raise InputError(
                    f"--replicas {options.replicas}: must be the number of ranks per stage, such as 2,1,1."
                )
            given["replicas"] = [int(count) for count in options.replicas.split(",")]
        others = {what for other in options.names[1:] for what in supported(other)} - supported(name)
        return cast("StreamOptions", {what: value for what, value in given.items() if what not in others})

    def _search(self, placement: Placement) -> tuple[Schedule, Found]:
        """Search, and with ``--prove`` prove a bound. Raises where no schedule keeps the caps or no solver is there."""

        def measure(schedule: Schedule) -> float:
            return simulate(schedule, self._costs(schedule), self.network).makespan

        options, conditions = self.options, self.conditions(placement, "search")
        found = schedules.search(
            placement=placement,
            num_microbatches=options.microbatches,
            conditions=conditions,
            effort=int(schedules.EFFORT if options.effort is None else options.effort * 1_000_000),
            measure=measure,
        )
        if options.prove is not None:
            found = schedules.prove(found, conditions=conditions, seconds=options.prove, measure=measure)
        return found.schedule, found

    def _costs(self, schedule: Schedule) -> Costs:
        """The costs for the stages of `schedule`."""
        if self.model is None:
            return self.costs
        found = self.model.costs(schedule)
        return replace(found, overlap=self.costs.overlap, rank_slowness=self.costs.rank_slowness)

    def _check_stages(self, schedule: Schedule) -> None:
        """Raise InputError if the costs file has another number of stages."""
        if self.file is not None and self.file.num_stages != schedule.num_stages:
            compared = " Compare schedules with as many stages." if self.options.names[0] == "compare" else ""
            raise InputError(
                f"--costs {self.options.costs} has {self.file.num_stages} stages, but schedule {schedule.name!r} has "
                f"{schedule.num_stages} on {schedule.num_ranks} ranks. Give one entry per stage.{compared}"
            )

    def conditions(self, placement: Placement, name: str) -> Conditions:
        """The costs and caps that the schedule `name` is built for; memory in bytes if known, else in rank-shares.

        Without overlap of communication, messages count as part of the computations.
        """
        plan = Schedule(name=name, num_microbatches=1, placement=placement, orders=())
        self._check_stages(plan)
        costs = self._costs(plan)
        seconds = costs.seconds(plan)
        ranks, limit = placement.num_ranks, self.options.memory_limit
        kept = costs.bytes_kept(plan)
        if kept is None:
            share = (plan.stage_share,) * plan.num_stages
            ratio = self.options.weight_gradient_memory
            kept = share, share if ratio is None else tuple(ratio * part for part in share)
        caps = (self.file.memory_caps if self.file is not None else None) or (math.inf,) * ranks
        if len(caps) != ranks:
            raise InputError(f"memory_cap_bytes has {len(caps)} entries for {ranks} ranks. Give one per rank.")
        if limit is not None:
            whole = sum(kept[0]) / ranks  # one rank-share of one micro-batch
            caps = tuple(min(cap, limit * whole) for cap in caps)
        slowness = costs.slowness(plan) or (1.0,) * ranks
        forward, backward_input, backward_weight = (
            tuple(time * slowness[home[0]] for time, home in zip(seconds[op], placement.replicas, strict=True))
            for op in (Op.F, Op.I, Op.W)
        )
        latency = self.network.message_seconds(plan, costs)
        if not self.network.overlap_communication:
            there, back = self.network.busy_seconds(plan, costs)
            forward = tuple(map(add, forward, there))
            backward_input = tuple(map(add, backward_input, back))
            latency = self.network.latency(ranks)
        return Conditions(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            latency=latency,
            overlap=costs.overlap,
            activation=kept[0],
            weight_gradient=kept[1],
            caps=caps,
        )

    def pipeline(self, schedule: Schedule) -> Schedule | Program:
        """The schedule or program to simulate, with data parallelism, offload and the updates of a stream.

        Updates take no time where stages have no replicas, so a large stream is simulated without them.
        """
        options, data = self.options, None
        if self.model is not None:
            data = self.model.data_axis()
        elif options.data is None and options.offload is None:
            stream = schedule.microbatches_per_update is not None
            replicated = schedule.placement.is_replicated
            return lower(schedule) if stream and (replicated or not schedule.large) else schedule
        elif options.data is not None:
            strategy = DataStrategy(options.data_strategy or DataStrategy.DDP)
            granularity = Granularity(options.data_granularity or Granularity.STEP)
            data = DataAxis(degree=options.data, strategy=strategy, granularity=granularity)
        program = lower(schedule, data=data)
        return program if options.offload is None else insert_offload(program, options.offload)

    def costs_of(self, schedule: Schedule) -> Costs:
        """The costs with sizes from the options. Raises InputError if the costs file has another number of stages."""
        self._check_stages(schedule)
        sizes: dict[str, Any] = {
            name: (getattr(self.options, name) * schedule.stage_share,) * schedule.num_stages
            for name in SIZES
            if getattr(self.options, name) is not None
        }
        if self.options.units is not None:
            sizes["units"] = (self.options.units,) * schedule.num_stages
        return replace(self._costs(schedule), **sizes)

    def memory(self, schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
        """Peak memory per rank and whether it is within the caps; empty without a memory option.

        A slice keeps 1/K of the activations of its micro-batch.
        """
        in_bytes = self._costs(schedule).activation_bytes is not None
        if not in_bytes and self.options.memory_limit is None and self.options.weight_gradient_memory is None:
            return {}
        conditions = self.conditions(schedule.placement, schedule.name)
        peaks = timeline.peak_bytes
        if peaks is None:
            held = peak_held(schedule, conditions)
            peaks = tuple(float(f"{peak / schedule.num_slices:.12g}") for peak in held)
        answer: dict[str, Any] = {"peak_bytes" if in_bytes else "peak_memory": [*peaks]}
        if any(math.isfinite(cap) for cap in conditions.caps):
            pairs = zip(peaks, conditions.caps, strict=True)
            answer["within_memory"] = all(peak <= cap * (1 + 1e-9) for peak, cap in pairs)
        return answer


def _slowness(words: Sequence[str] | None, num_ranks: int) -> tuple[float, ...] | None:
    """The factors of ``--slow-rank RANK:FACTOR``; None without the option."""
    if not words:
        return None
    factors: dict[int, float] = {}
    for word in words:
        match = re.fullmatch(r"(\d+):(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)", word, re.IGNORECASE | re.ASCII)
        if match is None or not 0 < float(match[2]) < math.inf:
            raise InputError(f"--slow-rank {word}: must be RANK:FACTOR with a factor > 0, such as 2:1.5.")
        rank = int(match[1])
        if rank >= num_ranks:
            raise InputError(f"--slow-rank {word}: ranks are 0..{num_ranks - 1}.")
        if rank in factors:
            raise InputError(f"--slow-rank {word}: rank {rank} already has a factor. Give one per rank.")
        factors[rank] = float(match[2])
    return tuple(factors.get(rank, 1.0) for rank in range(num_ranks))
