"""What all pictures share: colours, round axis ticks, numbers for people, and the share of each op in a column."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeloom.ir.action import COMPUTE_OPS, Op
from pipeloom.ir.schedule import Uses
from pipeloom.sim.timeline import Span

# Okabe and Ito's palette: told apart by colour-blind eyes, and dark text stays readable on each.
COLOURS = {
    Op.F: "#56b4e9",
    Op.B: "#e69f00",
    Op.I: "#009e73",
    Op.W: "#cc79a7",
    Op.REDUCE_GRAD: "#b3aa99",
    Op.STEP: "#0072b2",
    Op.UNSHARD: "#f0e442",
    Op.OFFLOAD: "#d9773f",
    Op.RELOAD: "#a7b84c",
}
OP_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward of inputs",
    Op.W: "backward of weights",
    Op.REDUCE_GRAD: "gradient reduction",
    Op.STEP: "update of parameters",
    Op.UNSHARD: "gathering of parameters",
    Op.OFFLOAD: "activations leave",
    Op.RELOAD: "activations come back",
}


def label(span: Span) -> str:
    """The micro-batch of a span, with its slice: ``"3"`` or ``"3.1"``."""
    _, _, microbatch, piece = span.action
    text = "" if microbatch is None else str(microbatch)
    return text if piece is None else f"{text}.{piece}"


def described(span: Span, versions: Uses) -> dict[str, int | str]:
    """What a span did, by name: its action and stage, its micro-batch or update, its slice and its version."""
    stage, op, number, piece = span.action
    said: dict[str, int | str] = {"action": str(span.action), "stage": stage}
    if number is not None:
        said["update" if op is Op.STEP else "microbatch"] = number
        if op is Op.STEP:
            said["version"] = number + 1
        elif op in COMPUTE_OPS and (stage, number) in versions:
            said["version"] = versions[stage, number]
    if piece is not None:
        said["slice"] = piece
    return said


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers from `low` to `high`, steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def op_shares(row: Sequence[Span], seconds: float, columns: int) -> list[dict[Op, float]]:
    """For each of `columns` equal pieces of `seconds`, the fraction that each op of one rank fills.

    How timelines are drawn whose spans are narrower than what can be seen.
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
