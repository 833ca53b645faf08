"""One file per family of schedules, and the table that lists them.

To add a schedule: write a pure function that returns a `Schedule`, decorate it with `family` of `table.py`, and import
it here. The checker, the simulator, the executor, the pictures, the search and the command line take it from there.
"""

import difflib
from typing import Unpack

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.schedule import Schedule
from pipeloom.schedules.conditions import Conditions
from pipeloom.schedules.sizes import keyword_checked
from pipeloom.schedules.table import FAMILIES, Family, StreamOptions
from pipeloom.schedules.user_defined import from_file, from_function, from_orders, is_file

# Tables, gallery and search list the families in the order of these imports.
# isort: off
from pipeloom.schedules.naive import naive
from pipeloom.schedules.gpipe import gpipe
from pipeloom.schedules.one_f_one_b import one_f_one_b
from pipeloom.schedules.pipedream import pipedream, pipedream_2bw, steady_length
from pipeloom.schedules.dapple import dapple_pb
from pipeloom.schedules.interleaved import interleaved
from pipeloom.schedules.breadth_first import breadth_first
from pipeloom.schedules.zero_bubble import zb_h1, zb_h2
from pipeloom.schedules.zb_auto import zb_auto
from pipeloom.schedules.zb_v import zb_v
from pipeloom.schedules.controllable_memory import v_half, v_min
from pipeloom.schedules.dualpipe import dualpipe, dualpipev
from pipeloom.schedules.chimera import chimera
from pipeloom.schedules.hanayo import hanayo
from pipeloom.schedules.terapipe import terapipe
from pipeloom.schedules.seq1f1b import seq1f1b, seq1f1b_interleaved
from pipeloom.schedules.search.search import EFFORT, Found, search
from pipeloom.schedules.search.constraint_program import prove

# isort: on

__all__ = [
    "EFFORT",
    "FAMILIES",
    "SYNCHRONOUS",
    "Conditions",
    "Family",
    "Found",
    "StreamOptions",
    "breadth_first",
    "build",
    "chimera",
    "dapple_pb",
    "dualpipe",
    "dualpipev",
    "from_file",
    "from_function",
    "from_orders",
    "gpipe",
    "hanayo",
    "interleaved",
    "is_file",
    "naive",
    "one_f_one_b",
    "pipedream",
    "pipedream_2bw",
    "prove",
    "search",
    "seq1f1b",
    "seq1f1b_interleaved",
    "steady_length",
    "terapipe",
    "v_half",
    "v_min",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

SYNCHRONOUS: dict[str, Family] = {name: family for name, family in FAMILIES.items() if not family.stream}
"""The families whose steps end with a flush: their gradients are those of plain gradient accumulation."""


@keyword_checked
def build(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    num_slices: int = 1,
    conditions: Conditions | None = None,
    **stream: Unpack[StreamOptions],
) -> Schedule:
    """The schedule `name` for these sizes; `num_chunks` is the family's own number if not given.

    Args:
        name: of the table, or a file with a schedule: ``file.csv``, ``file.json`` or ``file.py:function``.
        num_ranks, num_microbatches, num_chunks: sizes; a file's schedule must be for them.
        conditions: times, latencies and memory for the families that optimize for them; others ignore it.
        stream: options of streams, the families that update parameters while they run.

    Raises:
        ScheduleError: an unknown name, or sizes that the family or the file does not support.
    """
    if not isinstance(name, str):
        raise ScheduleError(f"schedule={folded(name)}: must be a str, such as '1f1b'.")
    if is_file(name):
        for option, value in stream.items():
            if value is not None:
                raise ScheduleError(
                    f"{option}={folded(value)}: schedule {name!r} is a file, which defines {option} itself. Remove "
                    f"`{option}`."
                )
        return from_file(name, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    return find(name)(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
        num_slices=num_slices,
        conditions=conditions,
        **stream,
    )


def find(name: str) -> Family:
    """The row of the table with this name.

    Raises:
        ScheduleError: there is none.
    """
    family = FAMILIES.get(name)
    if name == "auto":
        raise ScheduleError(
            "schedule 'auto': `pipeloom train` and `pl.plan` measure a model to choose its schedule. Pass a name, or "
            "the plan that `pl.plan` returns."
        )
    if family is None:
        close = difflib.get_close_matches(name, FAMILIES, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]!r}?" if close else "See `pipeloom schedules`."
        raise ScheduleError(f"schedule {name!r} is unknown: must be one of {', '.join(FAMILIES)}. {hint}")
    return family
