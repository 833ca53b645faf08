"""Shared parts of all pictures: colours, labels, axis ticks, the share of each op in a column."""

import math
from collections.abc import Collection, Sequence

from pipeloom.ir.action import COMPUTE_OPS, SKIP_OPS, Op
from pipeloom.ir.schedule import Uses
from pipeloom.sim.timeline import Span, Timeline

# The colour of each op, and its name in legends. The palette is that of Okabe and Ito, which colour-blind readers can
# distinguish; dark text is readable on each colour.
_LOOKS = {
    Op.F: ("#56b4e9", "forward"),
    Op.B: ("#e69f00", "backward"),
    Op.I: ("#009e73", "input gradients"),
    Op.W: ("#cc79a7", "weight gradients"),
    Op.REDUCE_GRAD: ("#b3aa99", "gradient reduction"),
    Op.STEP: ("#0072b2", "optimizer step"),
    Op.UNSHARD: ("#f0e442", "parameter all-gather"),
    Op.OFFLOAD: ("#d9773f", "activation offload"),
    Op.RELOAD: ("#a7b84c", "activation reload"),
}
COLOURS, OP_NAMES = ({op: look[place] for op, look in _LOOKS.items()} for place in (0, 1))


def label(span: Span) -> str:
    """The micro-batch of a span and its slice, if any: ``"3"`` or ``"3.1"``."""
    _, _, microbatch, piece = span.action
    text = "" if microbatch is None else str(microbatch)
    return text if piece is None or span.action.op in SKIP_OPS else f"{text}.{piece}"


def described(span: Span, versions: Uses) -> dict[str, int | str]:
    """The details of a span by name: action, stage, micro-batch or update, slice, weight version."""
    stage, op, number, piece = span.action
    details: dict[str, int | str] = {"action": str(span.action), "stage": stage}
    if number is not None:
        details["update" if op is Op.STEP else "microbatch"] = number
        if op is Op.STEP:
            details["version"] = number + 1
        elif op in COMPUTE_OPS and (stage, number) in versions:
            details["version"] = versions[stage, number]
    if piece is not None:
        details["other stage" if op in SKIP_OPS else "slice"] = piece
    return details


def ops_in(timelines: Sequence[Timeline], *, instant: Collection[Op] = ()) -> list[Op]:
    """The ops that a legend of `timelines` explains, in the order of `COLOURS`; `instant` ops may have no duration."""
    rows = [row for timeline in timelines for row in (*timeline.spans, *timeline.background)]
    used = {span.action.op for row in rows for span in row if span.end > span.start or span.action.op in instant}
    return [op for op in COLOURS if op in used]


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` multiples of 1, 2 or 5 times a power of ten from `low` to `high`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def op_shares(row: Sequence[Span], seconds: float, columns: int) -> list[dict[Op, float]]:
    """Per column of a picture, the fraction of its time that each op of one rank fills.

    Used for timelines whose spans are too narrow to draw.

    Args:
        row: the spans of the rank.
        seconds: the time that all columns stand for.
        columns: the number of columns.
    """
    shares: list[dict[Op, float]] = [{} for _ in range(columns)]
    width = seconds / columns if seconds else 1.0
    for action, start, end in row:
        if action.op not in COLOURS:
            continue
        first, last = int(start / width), min(columns - 1, int(end / width))
        for column in range(first, last + 1):
            overlap = min(end, (column + 1) * width) - max(start, column * width)
            if overlap > 0:
                shares[column][action.op] = shares[column].get(action.op, 0.0) + overlap / width
    return shares


def busy_shares(spans: Sequence[tuple[float, float]], seconds: float, columns: int) -> list[float]:
    """Per column of a picture, the fraction of its time that spans, as ``(start, end)``, fill; see `op_shares`."""
    shares, width = [0.0] * columns, seconds / columns if seconds else 1.0
    for start, end in spans:
        for column in range(int(start / width), min(columns - 1, int(end / width)) + 1):
            shares[column] += max(0.0, min(end, (column + 1) * width) - max(start, column * width)) / width
    return [min(1.0, share) for share in shares]
