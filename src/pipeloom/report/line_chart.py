"""Line charts of reports, as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pipeloom.common.quantities import number_text
from pipeloom.report.drawing import ticks

_LEFT, _RIGHT, _TOP, _BOTTOM = 54.0, 14.0, 12.0, 26.0  # margins of a line chart
_MOST_POINTS = 1200  # of a line


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line of a chart.

    Attributes:
        label: its name in tooltips.
        points: ``(x, y)``, ascending in x.
        style: a CSS class of the page (``a``, ``b``).
        marks: whether to draw a circle with a tooltip at each point.
    """

    label: str
    points: Sequence[tuple[float, float]]
    style: str = "a"
    marks: bool = False


def line_chart(series: Sequence[Series], *, width: float = 520.0, height: float = 170.0, x_label: str = "step") -> str:
    """Draw lines on common axes. A NaN or infinite value interrupts its line and is a red cross at the top edge."""
    finite = [(x, y) for line in series for x, y in line.points if math.isfinite(y)]
    if not finite:
        return '<p class="note">no finite value to draw</p>'
    x_low, x_high = _range([x for line in series for x, _ in line.points], pad=0.0)
    y_low, y_high = _range([y for _, y in finite], pad=0.06)
    plot_width, plot_height = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        across, down = (x - x_low) / (x_high - x_low), (y_high - y) / (y_high - y_low)
        return _LEFT + across * plot_width, _TOP + down * plot_height

    parts = []
    for tick in ticks(y_low, y_high, max(3, int(plot_height / 32))):
        _, y = at(x_low, tick)
        parts.append(f'<path class="grid" d="M{_LEFT:.0f} {y:.1f}H{width - _RIGHT:.0f}"/>')
        parts.append(f'<text x="{_LEFT - 7:.0f}" y="{y + 4:.1f}" text-anchor="end">{number_text(tick)}</text>')
    for tick in ticks(x_low, x_high, max(2, int(plot_width / 80))):
        x, _ = at(tick, y_low)
        parts.append(f'<text x="{x:.1f}" y="{height - 9:.0f}" text-anchor="middle">{number_text(tick)}</text>')
    parts.append(f'<text class="soft" x="2" y="{height - 9:.0f}">{escape(x_label)}</text>')
    for line in series:
        parts += _line(line, at)
    return (
        f'<svg class="chart" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="{escape(", ".join(line.label for line in series), quote=True)} by {escape(x_label)}">'
        f"{''.join(parts)}</svg>"
    )


def _line(line: Series, at: Callable[[float, float], tuple[float, float]]) -> list[str]:
    path, parts, pen_down = [], [], False
    for x, y in _thinned(line.points):
        tip = f"<title>{escape(line.label)} at {number_text(x)}: {number_text(y)}</title>"
        if not math.isfinite(y):
            pen_down = False
            px, _ = at(x, 0.0)
            parts.append(f'<path class="bad" d="M{px - 4:.1f} {_TOP - 4:.0f}l8 8m0 -8l-8 8">{tip}</path>')
            continue
        px, py = at(x, y)
        path.append(f"{'L' if pen_down else 'M'}{px:.1f} {py:.1f}")
        pen_down = True
        if line.marks:
            parts.append(f'<circle class="{line.style}" cx="{px:.1f}" cy="{py:.1f}" r="3.2">{tip}</circle>')
    return [f'<path class="line {line.style}" d="{"".join(path)}"/>', *parts]


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `_MOST_POINTS` finite points, the minimum and maximum of each interval, and all that are not finite."""
    if len(points) <= _MOST_POINTS:
        return points
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for first in range(0, len(points), size):
        piece = list(enumerate(points[first : first + size]))
        finite = [entry for entry in piece if math.isfinite(entry[1][1])]
        extremes = {choose(finite, key=lambda entry: entry[1][1])[0] for choose in (min, max)} if finite else set()
        kept += [point for index, point in piece if index in extremes or not math.isfinite(point[1])]
    return kept


def _range(values: Sequence[float], *, pad: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        spread = abs(low) * 0.1 or 1.0
        return low - spread, high + spread
    return low - pad * (high - low), high + pad * (high - low)
