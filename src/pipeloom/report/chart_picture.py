"""A line chart as a picture of its own."""

from collections.abc import Sequence
from html import escape

from pipeloom.report.line_chart import Series, line_chart

_COLOURS = {"a": "#0072b2", "b": "#d55e00", "c": "#009e73", "d": "#cc79a7"}
_STYLE = (
    ".pl{font:12px system-ui,sans-serif;color:#222;background:#fff}.pl text{fill:currentColor}"
    ".pl .grid{stroke:currentColor;stroke-opacity:.13}.pl .paper{fill:#fff}"
    "@media(prefers-color-scheme:dark){.pl{color:#ddd;background:#16181c}.pl .paper{fill:#16181c}}"
)
_LETTER = 7.0  # width of a letter, about


def chart_picture(series: Sequence[Series], *, title: str, x_label: str, width: float = 560.0) -> str:
    """An SVG file with the lines, a title and a legend.

    Args:
        series: the lines; each has one of the styles a, b, c, d. One without a label is not in the legend.
        title: what is drawn, with its unit.
        x_label: name of the horizontal axis.
        width: of the picture, in pixels.
    """
    height, head = 260.0, 60.0
    lines = "".join(
        f".pl .line.{key}{{stroke:{colour};fill:none;stroke-width:1.8}}.pl circle.{key}{{fill:{colour}}}"
        for key, colour in _COLOURS.items()
    )
    legend, left = "", 10.0
    for each in (line for line in series if line.label):
        legend += f'<rect x="{left:.0f}" y="32" width="14" height="14" fill="{_COLOURS[each.style]}"/>'
        legend += f'<text x="{left + 20:.0f}" y="44">{escape(each.label)}</text>'
        left += 40 + _LETTER * len(each.label)
    chart = line_chart(series, width=width, height=height, x_label=x_label)
    placed = chart.replace("<svg ", f'<svg x="0" y="{head:.0f}" width="{width}" height="{height}" ', 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="0 0 {width:.0f} {head + height:.0f}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{lines}{_STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/><text x="10" y="20">{escape(title)}</text>'
        f"{legend}{placed}</svg>\n"
    )
