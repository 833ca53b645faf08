"""What n expert-parallel processes send along ep for one micro-batch and layer of experts. No torch here.

    T tokens of a process, k experts per token, E experts, width W, e bytes per element

                 forward                                     backward
    counts       all-to-all of E integers of 8 bytes         -
                 rows to their experts, rows back            the same
    capacity     E C rows to their experts, and back         the same

A row has e W bytes. An all-to-all of counted rows sends the rows for other processes, and receives theirs: with
balanced experts (n-1)/n k T rows each way. With capacity every expert has C slots per process, full or not, and
(n-1)/n E C rows are sent each way.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.traffic import Sent, Table, Traffic, sends, total

Exchange = Literal["counts", "capacity"]
_EP = "ep"
_COUNT_BYTES = 8


class Rows(NamedTuple):
    """Assignments of tokens to experts, of one process; a row is one of them.

    Attributes:
        own: of its tokens, without dropped ones.
        sent: those to experts of other processes.
        received: of other processes' tokens to its experts.
    """

    own: int
    sent: int
    received: int


def rows_of(counts: Sequence[Sequence[int]], place: int) -> Rows:
    """The rows of process `place` from the assignments of every process to every expert, `counts[process][expert]`."""
    each = len(counts[0]) // len(counts)
    here = range(place * each, (place + 1) * each)
    sent = sum(number for expert, number in enumerate(counts[place]) if expert not in here)
    received = sum(row[expert] for process, row in enumerate(counts) if process != place for expert in here)
    return Rows(sum(counts[place]), sent, received)


def balanced_rows(sizes: ExpertSizes, tokens: int, degree: int, imbalance: float = 1.0, *, samples: int = 1) -> Rows:
    """The rows of the busiest process, whose load is `imbalance` times the mean; 1: all experts get as many tokens.

    Args:
        tokens, samples: of one process.
    """
    own = sizes.assignments(samples, tokens)
    sent = own * (degree - 1) // degree
    return Rows(own, sent, round(sent * imbalance))


def dispatch_traffic(
    sizes: ExpertSizes,
    degree: int,
    *,
    samples: int,
    tokens: int,
    width: int,
    element: int,
    exchange: Exchange = "counts",
    rows: Rows | None = None,
) -> Traffic:
    """Dispatch and combine of one layer.

    Args:
        sizes: of the experts.
        degree: number of expert-parallel processes.
        samples, tokens: of this process.
        width: of a row.
        element: bytes per element.
        exchange: how rows are exchanged.
        rows: that are sent and received; None: balanced experts.
    """
    if degree == 1:
        return Traffic({}, {})
    row = width * element
    if exchange == "capacity":
        slots = sends(_EP, "all_to_all", degree, sizes.experts * sizes.capacity(samples, tokens) * row)
        both = total([slots, slots])
        return Traffic(both, both)
    rows = balanced_rows(sizes, tokens, degree, samples=samples) if rows is None else rows
    there_and_back: Table = {(_EP, "all_to_all"): Sent(2, (rows.sent + rows.received) * row)}
    counts = sends(_EP, "all_to_all", degree, _COUNT_BYTES * sizes.experts)
    return Traffic(total([counts, there_and_back]), there_and_back)
