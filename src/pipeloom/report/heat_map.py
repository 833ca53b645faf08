"""Heat maps of reports, as SVG: one row per expert, one column per interval of steps, colour by load."""

import math
from collections.abc import Sequence
from html import escape

from pipeloom.common.quantities import number_text
from pipeloom.report.drawing import ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 14.0, 6.0, 26.0
_LEVELS = 12  # shades of a colour
MOST = 2.0  # the value of the darkest shade


def heat_map(
    label: str, steps: Sequence[float], rows: Sequence[Sequence[float]], *, width: float = 520.0, columns: int = 160
) -> str:
    """Draw values from 0 to `MOST` as shades; a larger value has the darkest one, a value that is not finite none.

    Args:
        label: what the picture shows, for readers that do not see it.
        steps: ascending, one per entry of a row.
        rows: one per expert.
        columns: at most as many columns are drawn; each is the mean of its steps.
    """
    rows, starts = _columns(rows, columns)
    height = max(3.0, min(18.0, 150.0 / len(rows)))
    wide = (width - _LEFT - _RIGHT) / max(1, len(starts))
    shades: dict[int, list[str]] = {}
    parts = []
    for index, row in enumerate(rows):
        y = _TOP + index * height
        for start, stop, level in _runs(row):
            if level:
                box = f"M{_LEFT + start * wide:.1f} {y:.1f}h{(stop - start) * wide:.1f}v{height:.1f}h"
                shades.setdefault(level, []).append(f"{box}{(start - stop) * wide:.1f}z")
        finite = [value for value in row if math.isfinite(value)]
        if finite:
            low, high, mean = min(finite), max(finite), math.fsum(finite) / len(finite)
            tip = f"expert {index}: mean {number_text(mean)}, {number_text(low)} to {number_text(high)}"
            box = f'x="{_LEFT:.0f}" y="{y:.1f}" width="{width - _LEFT - _RIGHT:.0f}" height="{height:.1f}"'
            parts.append(f'<rect class="over" {box}><title>{tip}</title></rect>')
    bottom = _TOP + len(rows) * height
    for index in range(0, len(rows), max(1, math.ceil(14 / height))):
        y = _TOP + (index + 0.5) * height + 4
        parts.append(f'<text x="{_LEFT - 7:.0f}" y="{y:.1f}" text-anchor="end">{index}</text>')
    parts += _axis(steps, width, bottom)
    drawn = [
        f'<path class="heat" fill-opacity="{k / _LEVELS:.2f}" d="{"".join(d)}"/>' for k, d in sorted(shades.items())
    ]
    return (
        f'<svg class="chart" viewBox="0 0 {width:.0f} {bottom + _BOTTOM:.0f}" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(drawn + parts)}</svg>'
    )


def _columns(rows: Sequence[Sequence[float]], columns: int) -> tuple[list[list[float]], list[int]]:
    """Rows of means over intervals, and where the intervals start."""
    count = len(rows[0])
    size = max(1, math.ceil(count / columns))
    starts = list(range(0, count, size))
    return [[_mean(row[start : start + size]) for start in starts] for row in rows], starts


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _runs(row: Sequence[float]) -> list[tuple[int, int, int]]:
    """Neighbouring columns of one shade: start, stop and shade; 0 where nothing is drawn."""
    levels = [round(_LEVELS * min(1.0, max(0.0, value) / MOST)) if math.isfinite(value) else 0 for value in row]
    found: list[tuple[int, int, int]] = []
    for index, level in enumerate(levels):
        if found and found[-1][2] == level:
            found[-1] = (found[-1][0], index + 1, level)
        else:
            found.append((index, index + 1, level))
    return found


def _axis(steps: Sequence[float], width: float, bottom: float) -> list[str]:
    low, high = steps[0], steps[-1]
    parts = [f'<text class="soft" x="2" y="{bottom + 17:.0f}">step</text>']
    for tick in ticks(low, high, 6) if high > low else [low]:
        x = _LEFT + (tick - low) / ((high - low) or 1.0) * (width - _LEFT - _RIGHT)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17:.0f}" text-anchor="middle">{number_text(tick)}</text>')
    return parts
