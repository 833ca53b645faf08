"""The table of schedules: `family` lists a function in it, with its paper, legal sizes and closed forms."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Required, TypedDict, Unpack

from pipeloom.common.quantities import counted
from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.sizes import MOST_ACTIONS, check_sizes, sized, unknown_keyword

P = ParamSpec("P")


class StreamOptions(TypedDict, total=False):
    """Optional arguments of `pipedream` and `pipedream_2bw`, `replicas` also of `one_f_one_b`; None: the default."""

    weights: str | None
    replicas: Sequence[int] | None
    microbatches_per_update: int | None
    in_flight: int | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table of schedules.

    Attributes:
        name: as on the command line.
        paper: its source.
        constraints: the sizes that it supports (p, m, v, k), and those for which the formulas hold.
        bubble: closed form of the idle fraction of the makespan for uniform stages without latency, in p, m, v, k and,
            where the backward is split, for equal times of F, I and W; "<= ..." where it is a bound.
        peak: closed form of the peak of live activations on rank d, in rank-shares of one micro-batch.
        build: the function; takes ``num_ranks`` and ``num_microbatches``, and ``num_chunks`` where `chunks` is None.
        sliced: whether `build` takes ``num_slices``, slices of a micro-batch along the sequence; others have one.
        to_measure: whether `build` takes `conditions`: times, latencies and memory to optimize for.
        chunks: virtual stages per rank; None if any number is supported.
        usual_chunks: the default if any number is supported.
        stream: for a schedule that updates parameters while it runs, the names of the `StreamOptions` that `build`
            takes; empty for a synchronous schedule. The closed forms include warm-up and cool-down.
        replicated: whether `build` of a synchronous schedule takes ``replicas``: stages on several ranks.
        most_actions: the most forwards and backwards per schedule.
    """

    name: str
    paper: str
    constraints: str = "any p >= 1, m >= 1"
    bubble: str
    peak: str
    build: Callable[..., Schedule]
    chunks: int | None = 1
    usual_chunks: int = 2
    sliced: bool = False
    to_measure: bool = False
    stream: tuple[str, ...] = ()
    replicated: bool = False
    most_actions: int = MOST_ACTIONS

    @property
    def default_chunks(self) -> int:
        return self.chunks or self.usual_chunks

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the `StreamOptions` that `build` takes."""
        return ("replicas",) if self.replicated else self.stream

    def __call__(
        self,
        *,
        num_ranks: int,
        num_microbatches: int,
        num_chunks: int | None = None,
        num_slices: int = 1,
        conditions: Conditions | None = None,
        **stream: Unpack[StreamOptions],
    ) -> Schedule:
        """The schedule for these sizes. Raises ScheduleError if the family does not support them."""
        chunks = self.default_chunks if num_chunks is None else num_chunks
        check_sizes(num_ranks, num_microbatches, chunks, num_slices, most=self.most_actions)
        if num_slices > 1 and not self.sliced:
            raise ScheduleError(
                f"{num_slices} slices: schedule {self.name!r} does not slice sequences. Use 1 slice, or one of "
                f"{', '.join(family.name for family in FAMILIES.values() if family.sliced)}."
            )
        if self.chunks is not None and chunks != self.chunks:
            raise ScheduleError(
                f"{chunks} chunks: schedule {self.name!r} has {counted(self.chunks, 'stage')} per rank. "
                f"Use {counted(self.chunks, 'chunk')}."
            )
        self.check_stream(stream)
        options: dict[str, Any] = {what: value for what, value in stream.items() if value is not None}
        options |= {"num_chunks": chunks} if self.chunks is None else {}
        if self.sliced:
            options["num_slices"] = num_slices
        if self.to_measure:
            options["conditions"] = conditions
        return self.build(num_ranks=num_ranks, num_microbatches=num_microbatches, **options)

    def check_stream(self, options: StreamOptions) -> None:
        """Raises ScheduleError for unknown keywords and for stream options that the family does not support."""
        for what, value in options.items():
            if what not in StreamOptions.__annotations__:
                sizes = ("num_ranks", "num_microbatches", "num_chunks", *(("num_slices",) if self.sliced else ()))
                known = (*sizes, "conditions", *self.options)
                raise ScheduleError(unknown_keyword(what, value, f"schedule {self.name!r}", known))
            if value is not None and what not in self.options:
                having = ", ".join(family.name for family in FAMILIES.values() if what in family.options)
                raise ScheduleError(
                    f"{what}={value}: schedule {self.name!r} does not take it. Remove it, or use {having}."
                )


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which `pipeloom.schedules` imports them."""


class Row(TypedDict, total=False):
    """The fields of `Family` beside `name` and `build`."""

    paper: Required[str]
    constraints: str
    bubble: Required[str]
    peak: Required[str]
    chunks: int | None
    usual_chunks: int
    sliced: bool
    to_measure: bool
    stream: tuple[str, ...]
    replicated: bool
    most_actions: int


def family(name: str, **row: Unpack[Row]) -> Callable[[Callable[P, Schedule]], Callable[P, Schedule]]:
    """List the decorated function in `FAMILIES`, and validate its keywords and sizes as `sized` does."""

    def listed(build: Callable[P, Schedule]) -> Callable[P, Schedule]:
        checked = sized(build)
        FAMILIES[name] = Family(name=name, build=checked, **row)
        return checked

    return listed
