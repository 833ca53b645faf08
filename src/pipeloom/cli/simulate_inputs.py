"""The inputs of `pipeloom simulate`: schedules, costs, links and memory from the options and the costs file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any, cast

from pipeloom import schedules
from pipeloom.cli.common.files import read_json
from pipeloom.errors import InputError
from pipeloom.ir import Op, Placement, Schedule
from pipeloom.schedules import Conditions, Found, StreamOptions
from pipeloom.schedules.conditions import peak_held
from pipeloom.schedules.sizes import check_sizes
from pipeloom.sim import Costs, CostsFile, Network, Timeline, parse_costs, simulate


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The options of one call, validated.

    Attributes:
        options: the parsed command line.
        costs, network: times of computations and messages.
        file: the costs file, if given.
    """

    options: Any
    costs: Costs
    network: Network
    file: CostsFile | None

    @classmethod
    def read(cls, options: Any) -> Inputs:
        """Read the options.

        Raises:
            InputError: the costs file cannot be read, or options exclude each other.
        """
        limit, ratio = options.memory_limit, options.weight_gradient_memory
        if limit is not None and not limit > 0:
            raise InputError(f"--memory-limit {limit:g}: must be more than 0 rank-shares of one micro-batch.")
        if ratio is not None and not 0 <= ratio <= 1:
            raise InputError(f"--weight-gradient-memory {ratio:g}: must be from 0 to 1, as a fraction of what F keeps.")
        for what in ("effort", "prove"):
            value = getattr(options, what)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise InputError(f"--{what} {value:g}: must be more than 0 and finite.")
        searched = "search" in options.names
        given = next((what for what in ("placement", "effort", "prove") if getattr(options, what) is not None), None)
        if given is not None and not searched:
            raise InputError(f"--{given} has no effect without schedule `search`. Remove it, or add search.")
        if options.costs is None:
            forward, backward_input, backward_weight = (
                1.0 if seconds is None else seconds
                for seconds in (options.forward, options.backward_input, options.backward_weight)
            )
            costs = Costs(
                forward=forward,
                backward_input=backward_input,
                backward_weight=backward_weight,
                overlap=options.overlap,
                rank_slowness=_slowness(options.slow_rank, options.ranks),
            )
            network = Network(latency_seconds=0.0 if options.latency is None else options.latency)
            return cls(options=options, costs=costs, network=network, file=None)
        for what in ("forward", "backward_input", "backward_weight", "latency"):
            if getattr(options, what) is not None:
                raise InputError(
                    f"--{what.replace('_', '-')} with --costs: the file has its value. Remove one of the two."
                )
        file = read_json("--costs", options.costs, parse_costs)
        if ratio is not None and file.costs.activation_bytes is not None:
            raise InputError(
                "--weight-gradient-memory with the bytes of --costs: the file has its value. Remove one of the two."
            )
        slowness = _slowness(options.slow_rank, options.ranks)
        costs = replace(file.costs, overlap=options.overlap, rank_slowness=slowness)
        return cls(options=options, costs=costs, network=file.network, file=file)

    @property
    def in_bytes(self) -> bool:
        """Whether memory is counted in bytes; else in rank-shares of one micro-batch."""
        return self.costs.activation_bytes is not None

    def schedule(self, name: str) -> tuple[Schedule, Found | None]:
        """The schedule `name`, and the result of the search if it was searched.

        Raises:
            ScheduleError, InputError: an unknown name, or sizes or costs that the schedule does not support.
        """
        schedule, found = self._make(name)
        self._check_stages(schedule)
        return schedule, found

    def _make(self, name: str) -> tuple[Schedule, Found | None]:
        options, ranks, microbatches = self.options, self.options.ranks, self.options.microbatches
        chunks = options.chunks
        if schedules.is_file(name):
            check_sizes(ranks, microbatches, 1 if chunks is None else chunks)
            schedule = schedules.build(
                name, num_ranks=ranks, num_microbatches=microbatches, num_chunks=chunks, **self.stream(name)
            )
            return schedule, None
        family = schedules.find(name)
        stream = self.stream(name)
        family.check_stream(stream)
        least = 2 if name == "search" and options.placement == "v" else 1  # a V needs two virtual stages per rank
        if chunks is None and family.chunks is None and self.file is not None and ranks > 0:
            chunks = max(least, self.file.num_stages // ranks)
        if chunks is None:
            chunks = max(least, family.default_chunks)
        slices = options.slices if family.sliced or options.names[0] != "compare" else 1
        check_sizes(ranks, microbatches, chunks, slices, most=family.most_actions)
        if name == "search":
            if slices > 1:
                raise InputError(f"{slices} slices: search does not slice sequences. Use 1 slice, or schedule seq1f1b.")
            placement = (Placement.v if options.placement == "v" else Placement.loop)(ranks, chunks)
            return self._search(placement, self.conditions(placement, name))
        measured = self.conditions(Placement.loop(ranks, chunks), name) if family.to_measure else None
        schedule = family(
            num_ranks=ranks,
            num_microbatches=microbatches,
            num_chunks=chunks,
            num_slices=slices,
            conditions=measured,
            **stream,
        )
        return schedule, None

    def stream(self, name: str) -> StreamOptions:
        """The options of a stream. When comparing, an option goes to the schedules that support it, if any does.

        Raises:
            InputError: `--replicas` is not a list of integers.
        """
        options = self.options
        replicas = None
        if options.replicas is not None:
            if re.fullmatch(r"\d+(,\d+)*", options.replicas, re.ASCII) is None:
                raise InputError(
                    f"--replicas {options.replicas}: must be the number of ranks per stage, such as 2,1,1."
                )
            replicas = [int(count) for count in options.replicas.split(",")]
        in_flight = options.in_flight
        if in_flight is not None and re.fullmatch(r"\d+", in_flight, re.ASCII):
            in_flight = int(in_flight)
        given = {
            "weights": options.weights,
            "replicas": replicas,
            "microbatches_per_update": options.microbatches_per_update,
            "in_flight": in_flight,
        }
        own = _stream_options(name)
        others = {what for other in options.names[1:] for what in _stream_options(other)} - own
        return cast("StreamOptions", {what: value for what, value in given.items() if what not in others})

    def _search(self, placement: Placement, conditions: Conditions) -> tuple[Schedule, Found]:
        """Search, and with ``--prove`` prove a bound.

        Raises:
            ScheduleError, InputError: no schedule keeps the caps, or no solver is installed.
        """
        options = self.options
        effort = int(schedules.EFFORT if options.effort is None else options.effort * 1_000_000)
        found = schedules.search(
            placement=placement,
            num_microbatches=options.microbatches,
            conditions=conditions,
            effort=effort,
            measure=self._seconds,
        )
        if options.prove is not None:
            found = schedules.prove(found, conditions=conditions, seconds=options.prove, measure=self._seconds)
        return found.schedule, found

    def _check_stages(self, schedule: Schedule) -> None:
        """Raise InputError if the costs file has another number of stages."""
        if self.file is not None and self.file.num_stages != schedule.num_stages:
            compared = " Compare schedules with as many stages." if self.options.names[0] == "compare" else ""
            raise InputError(
                f"--costs {self.options.costs} has {self.file.num_stages} stages, but schedule {schedule.name!r} has "
                f"{schedule.num_stages} on {schedule.num_ranks} ranks. Give one entry per stage.{compared}"
            )

    def _seconds(self, schedule: Schedule) -> float:
        """The simulated seconds per step."""
        return simulate(schedule, self.costs, self.network).makespan

    def conditions(self, placement: Placement, name: str) -> Conditions:
        """The costs and caps that the schedule `name` is built for; memory in bytes or rank-shares, see `in_bytes`.

        Without overlap of communication, messages count as part of the computations.
        """
        plan = Schedule(name=name, num_microbatches=1, placement=placement, orders=())
        self._check_stages(plan)
        seconds = self.costs.seconds(plan)
        ranks, limit = placement.num_ranks, self.options.memory_limit
        kept = self.costs.bytes_kept(plan)
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
        slowness = self.costs.slowness(plan) or (1.0,) * ranks
        forward, backward_input, backward_weight = (
            tuple(time * slowness[home[0]] for time, home in zip(seconds[op], placement.replicas, strict=True))
            for op in (Op.F, Op.I, Op.W)
        )
        latency = self.network.message_seconds(plan, self.costs)
        if not self.network.overlap_communication:
            there, back = self.network.busy_seconds(plan, self.costs)
            forward = tuple(map(add, forward, there))
            backward_input = tuple(map(add, backward_input, back))
            latency = self.network.latency(ranks)
        return Conditions(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            latency=latency,
            overlap=self.costs.overlap,
            activation=kept[0],
            weight_gradient=kept[1],
            caps=caps,
        )

    def memory(self, schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
        """Peak memory per rank and whether it is within the caps; empty without a memory option.

        A slice keeps 1/K of the activations of its micro-batch.
        """
        options = self.options
        asked = options.memory_limit is not None or options.weight_gradient_memory is not None
        if not asked and not self.in_bytes:
            return {}
        conditions = self.conditions(schedule.placement, schedule.name)
        held = timeline.peak_bytes
        if held is None:
            peaks = [float(f"{peak / schedule.num_slices:.12g}") for peak in peak_held(schedule, conditions)]
        else:
            peaks = list(held)
        answer: dict[str, Any] = {"peak_bytes" if self.in_bytes else "peak_memory": peaks}
        if any(math.isfinite(cap) for cap in conditions.caps):
            answer["within_memory"] = all(
                peak <= cap * (1 + 1e-9) for peak, cap in zip(peaks, conditions.caps, strict=True)
            )
        return answer


def _stream_options(name: str) -> set[str]:
    return set() if schedules.is_file(name) else set(schedules.find(name).stream)


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
