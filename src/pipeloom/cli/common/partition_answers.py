"""The output of `pipeloom partition`: numbers for ``--json``, lines of text, and a plan.

The arguments of both answers are the profile, (components, bandwidth) per level of the cluster, the options of the
command, and options of a training run on the measured model, which are empty for a profile from a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pipeloom.cli.common.inside_options import inside_text, plan_fields
from pipeloom.cli.common.planning import planned_options, stream_command, train_command
from pipeloom.common.quantities import bytes_text, counted, seconds_text, table_lines
from pipeloom.errors import InputError, shortened
from pipeloom.plan.partition import (
    Partition,
    Profile,
    data_parallel,
    noam_period,
    partition_layers,
    partition_synchronous,
    shared_weights,
    stream_plan,
    synchronous_plan,
)
from pipeloom.plan.partition.cuts import MOST_CUTS
from pipeloom.plan.partition.shared_profile import is_gpt
from pipeloom.plan.plan import Plan
from pipeloom.plan.shared_layers import SharedLayers
from pipeloom.schedules import find, steady_length

_MOST_SIMULATED = 50_000  # forwards per step; larger steps are not simulated
_MOST_SHOWN = 40  # characters of a layer's name
_NEARLY = 1.001  # relative difference below which two periods count as equal
_Levels = Sequence[tuple[int, float]]
_Options = Mapping[str, Any]
_POLICIES = ("1f1b", "dapple-pb")


class StreamAnswer:
    """PipeDream's partition, compared with data parallelism alone and with one stage per rank."""

    def __init__(self, profile: Profile, levels: _Levels, given: _Options, options: _Options) -> None:
        self._form, self._options, self._layers = given["form"], options, given["layers"]
        cap, model = given["memory_cap"], {"form": given["form"], "state_copies": given["state_copies"]}
        self._found = found = partition_layers(profile, levels, memory_cap=cap, **model)
        self._profile = profile.reordered(found.order)
        together = data_parallel(profile, levels, **model)
        self._together = None if cap is not None and together.memory_bytes > cap else together
        self._straight, self._obstacle = None, ""
        try:
            self._straight = partition_layers(profile, levels, memory_cap=cap, replicate=False, **model)
        except InputError as error:
            self._obstacle = str(error).split(":")[0]
        self._noam_seconds = noam_period(found)
        self._waits = self._noam_seconds > found.period_seconds * _NEARLY
        fits = cap is None or found.full_memory_bytes <= cap
        self._in_flight: Literal["noam", "full"] = "full" if self._waits and fits else "noam"
        self._ties = _ties(self._profile, [(stage.first, stage.last) for stage in found.stages])

    def numbers(self) -> dict[str, Any]:
        """The numbers of ``--json``."""
        found, fewer, straight, together = self._found, self._found.fewer_ranks, self._straight, self._together
        return {
            "stages": [_stage(self._profile, stage.first, stage.last, stage.replicas) for stage in found.stages],
            "period_seconds": found.period_seconds,
            "form": self._form,
            "bottleneck": {"kind": found.bottleneck.kind, "stage": found.bottleneck.stage},
            "in_flight": [stage.in_flight for stage in found.stages],
            "memory_bytes": [stage.memory_bytes for stage in found.stages],
            "noam_period_seconds": self._noam_seconds,
            "full_in_flight": [stage.full_in_flight for stage in found.stages],
            "full_memory_bytes": [stage.full_memory_bytes for stage in found.stages],
            "replicas_by_level": [list(stage.replicas_by_level) for stage in found.stages],
            "data_parallel_seconds": together and together.period_seconds,
            "straight_pipeline_seconds": straight and straight.period_seconds,
            "fewer_ranks": fewer and {"ranks": fewer[0], "period_seconds": fewer[1]},
            "ties": self._ties,
            **_devices(self._layers, sum(stage.replicas for stage in found.stages)),
        }

    def plan(self) -> Plan:
        """The partition as a plan of schedule `pipedream`. Raises InputError if several stages share weights."""
        why, size = [*self._reasons(), *self._waiting()], self._options.get("batch.size")
        found = stream_plan(self._profile, self._found, in_flight=self._in_flight, batch_size=size, why=why)
        return _with_processes(found, self._layers)

    def lines(self, path: str | None) -> list[str]:
        """The answer as text; `path` is the plan file, if one was written."""
        rows: list[tuple[str, ...]] = []
        for stage in self._found.stages:
            times = (stage.compute_seconds, stage.sync_seconds, stage.transfer_seconds)
            replicas = " x ".join(map(str, stage.replicas_by_level))
            numbers = (*map(_seconds, times), str(stage.in_flight), bytes_text(stage.memory_bytes))
            rows.append((*_layers(self._profile, stage.first, stage.last), replicas, *numbers))
        table = _table(("compute", "sync", "transfer", "in flight", "memory"), rows)
        first, *others = self._reasons()
        return [first, *table, *others, *_shared(self._ties), *self._waiting(), *self._training(path)]

    def _reasons(self) -> list[str]:
        found, fewer = self._found, self._found.fewer_ranks
        ranks = sum(stage.replicas for stage in found.stages)
        lines = [
            f"{seconds_text(found.period_seconds)} per minibatch, {counted(len(found.stages), 'stage')} on "
            f"{counted(ranks, 'rank')}{_of_processes(self._layers)}; {self._why(found)}",
            *_scaled(self._layers),
            *_few_cuts(found.all_cuts),
            self._compared("data parallelism alone", self._together, "exceeds the memory cap"),
            self._compared("one stage per rank", self._straight, f"is not possible ({self._obstacle})"),
        ]
        if fewer is not None:
            lines.append(
                f"{counted(fewer[0], 'rank')} alone would take {seconds_text(fewer[1])}: the others cost more than "
                "they save"
            )
        return lines

    def _waiting(self) -> list[str]:
        """A line if stages wait for each other with PipeDream's NOAM."""
        if not self._waits:
            return []
        noam = ", ".join(str(stage.in_flight) for stage in self._found.stages)
        full = ", ".join(str(stage.full_in_flight) for stage in self._found.stages)
        capped, but = (", within the memory cap", "but") if self._in_flight == "noam" else ("", "and")
        return [
            f"in flight noam ({noam}): {seconds_text(self._noam_seconds)} per minibatch{capped}; in flight full "
            f"({full}) reaches the period {but} needs {bytes_text(self._found.full_memory_bytes)} on the fullest rank"
        ]

    def _training(self, path: str | None) -> list[str]:
        """Lines on how to train the partition, or why it cannot be trained."""
        try:
            plan = self.plan()
        except InputError as error:
            return [f"pipeloom cannot train this: {error}"]
        here = bool(self._options)
        in_python = f"train it in Python: pl.Pipeline(model, {_in_python(plan, path)})"
        if self._profile.edges is not None:
            return [in_python]
        gpt = is_gpt(self._profile)
        tied = {"model.tie_embeddings": True} if gpt and self._profile.ties else {}
        try:
            command = stream_command(plan if gpt else replace(plan, cut=None), tied | dict(self._options), path=path)
            lines = [f"{'train it' if here else 'train a GPT of pipeloom'}: {command}"]
        except InputError as error:
            lines = [f"pipeloom train cannot run this: {error}"]
        return lines if here else [in_python, *lines]

    def _compared(self, name: str, other: Partition | None, missing: str) -> str:
        """A line on another partition; `missing` says why there is none."""
        if other is None:
            return f"{name} {missing}"
        ratio = other.period_seconds / self._found.period_seconds if self._found.period_seconds else 1.0
        return f"{name} takes {seconds_text(other.period_seconds)}, {ratio:.2f}x as long; {self._why(other)}"

    def _why(self, found: Partition) -> str:
        """The bottleneck of a partition."""
        number = found.bottleneck.stage
        stage = found.stages[number]
        if found.bottleneck.kind == "transfer":
            return f"bottleneck: transfer from stage {number} to {number + 1}"
        times = {"compute": stage.compute_seconds, "sync": stage.sync_seconds}
        longer = times.pop(found.bottleneck.kind)
        [(other, seconds)] = times.items()
        joined = "plus" if self._form == "summed" else "overlaps"
        more = f" ({joined} {other} {seconds_text(seconds)})" if seconds else ""
        return f"bottleneck: {found.bottleneck.kind} of stage {number}, {seconds_text(longer)}{more}"


class SynchronousAnswer:
    """DAPPLE's partition, and the simulated step under DAPPLE's two policies."""

    def __init__(self, profile: Profile, levels: _Levels, given: _Options, options: _Options) -> None:
        [(ranks, bandwidth)], microbatches = levels, given["microbatches"]
        published = given["form"] == "published"
        self._options, self._layers = options, given["layers"]
        self._found = found = partition_synchronous(
            profile,
            ranks=ranks,
            bandwidth=bandwidth,
            num_microbatches=microbatches,
            published=published,
            context=given["inside"].context,
            memory_cap=given["memory_cap"],
            state_copies=given["state_copies"],
        )
        self._profile = profile.reordered(found.order)
        small = microbatches * len(found.stages) <= _MOST_SIMULATED
        self._simulated = {name: found.simulate(find(name)) for name in _POLICIES} if small else {}
        self._ties = _ties(self._profile, [(first, last) for first, last, _ in found.stages])
        self._why = [
            f"{seconds_text(found.step_seconds)} per step of {counted(found.num_microbatches, 'micro-batch')}, "
            f"{counted(len(found.stages), 'stage')} on {counted(ranks, 'rank')}{_of_processes(self._layers)}",
            *_scaled(self._layers),
            *_few_cuts(found.all_cuts),
        ]
        if small:
            times = ", ".join(f"{seconds_text(seconds)} with {name}" for name, seconds in self._simulated.items())
            self._why.append(f"simulated: {times}")

    def numbers(self) -> dict[str, Any]:
        """The numbers of ``--json``."""
        found = self._found
        return {
            "stages": [_stage(self._profile, *stage) for stage in found.stages],
            "step_seconds": found.step_seconds,
            "least_step_seconds": found.least_step_seconds,
            "memory_bytes": list(found.memory_bytes),
            "simulated_seconds": self._simulated,
            "ties": self._ties,
            **_devices(self._layers, sum(replicas for _, _, replicas in found.stages)),
        }

    def plan(self) -> Plan:
        """The partition as a plan under the faster policy. Raises InputError if numbers of replicas differ."""
        times = self._simulated or {_POLICIES[0]: self._found.step_seconds}
        name, size = min(times, key=times.__getitem__), self._options.get("batch.size")
        found = synchronous_plan(
            self._profile, self._found, schedule=name, seconds=times[name], batch_size=size, why=self._why
        )
        return _with_processes(found, self._layers)

    def lines(self, path: str | None) -> list[str]:
        """The answer as text."""
        found = self._found
        times = (found.forward_seconds, found.backward_seconds, (*found.transfer_seconds, 0.0), found.reduce_seconds)
        rows = [
            (*_layers(self._profile, first, last), str(replicas), *map(_seconds, seconds), bytes_text(held))
            for (first, last, replicas), held, *seconds in zip(found.stages, found.memory_bytes, *times, strict=True)
        ]
        table = _table(("forward", "backward", "transfer", "sync", "memory"), rows)
        return [self._why[0], *table, *self._why[1:], *_shared(self._ties), *self._training(path)]

    def _training(self, path: str | None) -> list[str]:
        """A line on how to train the partition, where a plan was written or the model is known."""
        if path is None and not self._options:
            return []
        try:
            first = planned_options(self.plan()) if path is None else {"plan": path}
        except InputError as error:
            return [f"pipeloom cannot train this: {error}"]
        more = {key: value for key, value in self._options.items() if key not in first and key != "batch.size"}
        return [f"train it: {train_command(first | more)}"]


def _of_processes(layers: SharedLayers | None) -> str:
    return "" if layers is None else f" of {layers.inside.processes} processes"


def _devices(layers: SharedLayers | None, ranks: int) -> dict[str, Any]:
    return {} if layers is None else {"devices": ranks * layers.inside.processes}


def _scaled(layers: SharedLayers | None) -> list[str]:
    """A line on what processes that share a stage change of the profile, which is of one process."""
    if layers is None:
        return []
    seconds = sum(layers.collectives())
    return [
        f"{inside_text(layers.inside)}: the profile is of one process; computation is divided, and collectives at "
        f"{bytes_text(layers.bytes_per_second)}/s added ({seconds_text(seconds)} per block, less what is hidden)"
    ]


def _few_cuts(all_cuts: bool) -> list[str]:
    """A line where not all cuts of a graph were tried."""
    if all_cuts:
        return []
    return [f"the graph has more than {MOST_CUTS:,} cuts, of which some were tried"]


def _with_processes(plan: Plan, layers: SharedLayers | None) -> Plan:
    return plan if layers is None else replace(plan, **plan_fields(layers.inside))


def _in_python(plan: Plan, path: str | None) -> str:
    """The second argument of `pipeloom.Pipeline`, and the cut."""
    if path is not None:
        return f'pl.Plan.load("{path}")'
    replicas = list(plan.replicas or ())
    words = [
        f"num_ranks={plan.num_ranks}",
        f"num_microbatches={steady_length(replicas, in_flight=plan.in_flight)}",
        f"replicas={replicas}",
        *(["in_flight='full'"] if plan.in_flight == "full" else []),
    ]
    assert isinstance(plan.cut, tuple)
    return f"pl.schedules.pipedream({', '.join(words)}), cut={list(plan.cut)}"


def _ties(profile: Profile, stages: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"bytes": size, "stages": homes} for size, homes in shared_weights(profile, stages)]


def _shared(ties: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"stages {', '.join(map(str, tie['stages']))} share weights of {bytes_text(tie['bytes'])}: the times leave out "
        "the sum of their gradients"
        for tie in ties
    ]


def _stage(profile: Profile, first: int, last: int, replicas: int) -> dict[str, Any]:
    """A stage in ``--json``; of a graph, whose layers are in the order of the stages, with names."""
    found: dict[str, Any] = {"layers": [first, last], "replicas": replicas}
    if profile.edges is not None:
        found["names"] = [layer.name for layer in profile.layers[first : last + 1]]
    return found


def _layers(profile: Profile, first: int, last: int) -> tuple[str, str]:
    """The layers of a stage by number and by name, on one line: control characters are escaped."""
    names = dict.fromkeys(_shown(profile.layers[layer].name) for layer in (first, last))
    return f"{first}-{last}", " .. ".join(names)


def _shown(name: str) -> str:
    return shortened("".join(each if each.isprintable() else repr(each)[1:-1] for each in name), _MOST_SHOWN)


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    numbered = [(str(stage), *row) for stage, row in enumerate(rows)]
    return table_lines([("stage", "layers", "", "replicas", *columns), *numbered], left=(1, 2))
