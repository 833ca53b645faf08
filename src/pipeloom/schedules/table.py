"""The table of schedules with a name, all but the search: their papers, legal sizes and closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

from pipeloom.common.quantities import counted
from pipeloom.errors import ScheduleError
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.breadth_first import breadth_first
from pipeloom.schedules.chimera import chimera
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.controllable_memory import v_half, v_min
from pipeloom.schedules.dapple import dapple_pb
from pipeloom.schedules.dualpipe import dualpipe, dualpipev
from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.hanayo import hanayo
from pipeloom.schedules.interleaved import interleaved
from pipeloom.schedules.naive import naive
from pipeloom.schedules.one_f_one_b import one_f_one_b
from pipeloom.schedules.pipedream import StreamOptions, pipedream, pipedream_2bw
from pipeloom.schedules.seq1f1b import seq1f1b, seq1f1b_interleaved
from pipeloom.schedules.sizes import MOST, MOST_ACTIONS, check_sizes, unknown_keyword
from pipeloom.schedules.terapipe import terapipe
from pipeloom.schedules.zb_auto import zb_auto
from pipeloom.schedules.zb_v import zb_v
from pipeloom.schedules.zero_bubble import zb_h1, zb_h2

_SIZES = ("num_ranks", "num_microbatches", "num_chunks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table of schedules.

    Attributes:
        name: as on the command line.
        paper: its source.
        constraints: the conditions on p, m, v and k, as text.
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
    """

    name: str
    paper: str
    constraints: str
    bubble: str
    peak: str
    build: Callable[..., Schedule]
    chunks: int | None = 1
    usual_chunks: int = 2
    sliced: bool = False
    to_measure: bool = False
    stream: tuple[str, ...] = ()

    @property
    def default_chunks(self) -> int:
        return self.chunks or self.usual_chunks

    @property
    def most_actions(self) -> int:
        return MOST.get(self.name, MOST_ACTIONS)  # forwards and backwards of the largest that is made

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
                f"{', '.join(family.name for family in NAMED.values() if family.sliced)}."
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
                known = (*_SIZES, *(("num_slices",) if self.sliced else ()), "conditions", *self.stream)
                raise ScheduleError(unknown_keyword(what, value, f"schedule {self.name!r}", known))
            if value is not None and what not in self.stream:
                having = ", ".join(family.name for family in NAMED.values() if what in family.stream)
                raise ScheduleError(
                    f"{what}={value}: schedule {self.name!r} does not take it. Remove it, or use {having}."
                )


NAMED: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="naive",
            paper="naive model parallelism",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/p",
            peak="1",
            build=naive,
        ),
        Family(
            name="gpipe",
            paper="GPipe, arXiv:1811.06965",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/(m+p-1)",
            peak="m",
            build=gpipe,
        ),
        Family(
            name="1f1b",
            paper="PipeDream-Flush, arXiv:2006.09503",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/(m+p-1)",
            peak="min(p-d, m)",
            build=one_f_one_b,
        ),
        Family(
            name="pipedream",
            paper="PipeDream, SOSP 2019, arXiv:1806.03377",
            constraints="a stream, no bubble in its steady state; any p >= 1, m >= 1; replicas: m a multiple of each",
            bubble="(p-1)/(m+p-1)",
            peak="min(p-d, m)",
            build=pipedream,
            stream=("weights", "replicas", "microbatches_per_update", "in_flight"),
        ),
        Family(
            name="pipedream-2bw",
            paper="PipeDream-2BW, arXiv:2006.09503",
            constraints="a stream, no bubble in its steady state; n >= p-1 micro-batches an update (p), m % n == 0",
            bubble="(p-1)/(m+p-1)",
            peak="min(p-d, m)",
            build=pipedream_2bw,
            stream=("replicas", "microbatches_per_update", "in_flight"),
        ),
        Family(
            name="dapple-pb",
            paper="DAPPLE policy PB, arXiv:2007.01045",
            constraints="any p >= 1, m >= 1",
            bubble="(p-1)/(m+p-1)",
            peak="min(2*(p-d)-1, m)",
            build=dapple_pb,
        ),
        Family(
            name="interleaved",
            paper="Megatron-LM, arXiv:2104.04473",
            constraints="v > 1: m >= p, m % p == 0; other groups of N: p <= N <= m, m % N == 0 or m % N >= p",
            bubble="(p-1)/(m*v+p-1)",
            peak="min((v-1)*p + 2*(p-1-d) + 1, m*v)/v if v > 1 else min(p-d, m)",
            build=interleaved,
            chunks=None,
        ),
        Family(
            name="bfs",
            paper="breadth-first, arXiv:2211.05953",
            constraints="any p >= 1, m >= 1, v >= 1; bubble for m >= p",
            bubble="(p-1)/(m*v+p-1)",
            peak="m",
            build=breadth_first,
            chunks=None,
        ),
        Family(
            name="zb-h1",
            paper="Zero Bubble, arXiv:2401.10241",
            constraints="any p >= 1, m >= 1; bubble and peak for m >= p",
            bubble="(p-1)/(3*m+p-1)",
            peak="p",
            build=zb_h1,
        ),
        Family(
            name="zb-h2",
            paper="Zero Bubble, arXiv:2401.10241",
            constraints="any p >= 1, m >= 1; bubble and peak for m >= 2*p-1",
            bubble="(p-1)/(3*m+p-1)",
            peak="2*p-1",
            build=zb_h2,
        ),
        Family(
            name="zb-auto",
            paper="Zero Bubble, arXiv:2401.10241",
            constraints="any p >= 1, m >= 1, any memory limit of at least 1; bubble for m >= 2*p-1 and no limit",
            bubble="<= (p-1)/(3*m+p-1)",
            peak="<= m",
            build=zb_auto,
            to_measure=True,
        ),
        Family(
            name="zb-v",
            paper="Zero Bubble, arXiv:2401.10241",
            constraints="v = 2; any p >= 1, m >= 1; bubble and peak for m >= 2*p-1",
            bubble="(p-1)/(6*m+p-1)",
            peak="p",
            build=zb_v,
            chunks=2,
        ),
        Family(
            name="v-half",
            paper="controllable memory, arXiv:2405.15362",
            constraints="v = 2; any p >= 1, m >= 1; bubble for m >= 2*p",
            bubble="<= (p-1)/(2*m+p-1)",
            peak="<= (p+2)//2",
            build=v_half,
            chunks=2,
        ),
        Family(
            name="v-min",
            paper="controllable memory, arXiv:2405.15362",
            constraints="v = 2; any p >= 1, m >= 1; bubble for m >= 2*p",
            bubble="<= (2*p-2)/(3*m+2*p-2)",
            peak="<= (p+4)//3",
            build=v_min,
            chunks=2,
        ),
        Family(
            name="dualpipe",
            paper="DualPipe, arXiv:2412.19437",
            constraints="every stage twice; p even, m even, m >= 2*p",
            bubble="(p-2)/(3*m+p-2)",
            peak="p+1",
            build=dualpipe,
            chunks=2,
        ),
        Family(
            name="dualpipev",
            paper="DualPipeV: DualPipe cut in half, Sea AI Lab 2025",
            constraints="v = 2; m >= 2*p",
            bubble="(p-1)/(3*m+p-1)",
            peak="p+1/2",
            build=dualpipev,
            chunks=2,
        ),
        Family(
            name="chimera",
            paper="Chimera, arXiv:2107.06925",
            constraints="every stage twice; p even; bubble and peak for m = p, bubble for even m >= p",
            bubble="(2*p-4)/(3*m+2*p-4)",
            peak="p/2 + 1 + min(d, p-1-d)",
            build=chimera,
            chunks=2,
        ),
        Family(
            name="hanayo",
            paper="Hanayo, arXiv:2308.15762",
            constraints="v even; bubble for m = p",
            bubble="<= (2*p-2)/(3*p*v/2+p-1)",
            peak="<= p",
            build=hanayo,
            chunks=None,
        ),
        Family(
            name="terapipe",
            paper="TeraPipe, arXiv:2102.07988",
            constraints="k slices of each sequence; any p >= 1, m >= 1, k >= 1",
            bubble="(p-1)/(m*k+p-1)",
            peak="m",
            build=terapipe,
            sliced=True,
        ),
        Family(
            name="seq1f1b",
            paper="Seq1F1B, arXiv:2406.03488",
            constraints="k slices of each sequence; any p >= 1, m >= 1, k >= 1",
            bubble="(p-1)/(m*k+p-1)",
            peak="min(p-d+k-1, m*k)/k",
            build=seq1f1b,
            sliced=True,
        ),
        Family(
            name="seq1f1b-interleaved",
            paper="Seq1F1B, arXiv:2406.03488",
            constraints="k slices of each sequence; v > 1: p % k == 0, m*k % p == 0",
            bubble="(p-1)/(m*k*v+p-1)",
            peak="min((v-1)*p + 2*(p-1-d) + k, m*k*v)/(k*v) if v > 1 else min(p-d+k-1, m*k)/k",
            build=seq1f1b_interleaved,
            chunks=None,
            sliced=True,
        ),
    )
}
