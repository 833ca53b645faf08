"""The picture of dispatch and combine along ep, for ``python docs/draw.py``: which process has which token where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")
_CELL, _HIGH, _LEFT, _TOP, _STEP = 26.0, 24.0, 96.0, 58.0, 186.0
_STYLE = (
    ".pl{font:12px system-ui,sans-serif;color:#222;background:#fff}.pl text{fill:currentColor}.pl .paper{fill:#fff}"
    ".pl .on{fill:#111}.pl rect.cell{stroke:#222;stroke-width:.7}.pl .name{font-weight:600}"
    ".pl .way{stroke:currentColor;stroke-opacity:.35;fill:none}.pl .cut{stroke:currentColor;stroke-dasharray:4 4}"
    "@media(prefers-color-scheme:dark){.pl{color:#ddd;background:#16181c}.pl .paper{fill:#16181c}}"
)
_CHOSEN = ((0, 2, 0, 3, 1, 0), (2, 1, 3, 3, 2, 3))  # the expert of each token, by process
_EXPERTS, _EACH = 4, 2  # experts in all, and per process
_COLUMNS = (
    ("tokens", ""),
    ("sorted by expert", ""),
    ("on their experts'", "process"),
    ("sorted by expert", "and computed"),
    ("combined", ""),
)


class Cell(NamedTuple):
    """A token of a process, and its expert."""

    process: int
    token: int
    expert: int

    @property
    def label(self) -> str:
        return f"{'ab'[self.process]}{self.token}"


def experts_picture() -> str:
    """Tokens of two processes on their way to four experts and back."""
    columns = _columns()
    rows = max(len(cells) for column in columns for cells in column)
    gap = rows * _HIGH + 26
    width, height = _LEFT + 4 * _STEP + _CELL + 60, _TOP + 2 * gap
    parts = []
    for number, (title, more) in enumerate(_COLUMNS):
        x = _LEFT + number * _STEP
        parts.append(f'<text x="{x:.0f}" y="20">{title}</text><text x="{x:.0f}" y="36">{more}</text>')
    for process in range(2):
        y = _TOP + process * gap
        experts = " and ".join("ABCD"[e] for e in range(process * _EACH, (process + 1) * _EACH))
        parts.append(f'<text class="name" x="8" y="{y + 16:.0f}">process {process}</text>')
        parts.append(f'<text x="8" y="{y + 34:.0f}">experts</text><text x="8" y="{y + 50:.0f}">{experts}</text>')
    parts.append(f'<path class="cut" d="M8 {_TOP + gap - 15:.0f}H{width - 8:.0f}"/>')
    places = [_places(column, number, gap) for number, column in enumerate(columns)]
    for number in range(len(columns) - 1):
        for cell, (x, y) in places[number].items():
            to_x, to_y = places[number + 1][cell]
            start, end = x + _CELL, to_x
            middle = (start + end) / 2
            parts.append(
                f'<path class="way" d="M{start:.0f} {y + _HIGH / 2:.0f}C{middle:.0f} {y + _HIGH / 2:.0f} {middle:.0f} '
                f'{to_y + _HIGH / 2:.0f} {end:.0f} {to_y + _HIGH / 2:.0f}"/>'
            )
    for number, found in enumerate(places):
        for cell, (x, y) in found.items():
            plain = number in (0, len(places) - 1)
            colour = "#e8e8e8" if plain else _COLOURS[cell.expert]
            parts.append(
                f'<rect class="cell" x="{x:.0f}" y="{y:.0f}" width="{_CELL:.0f}" height="{_HIGH:.0f}" '
                f'fill="{colour}"/><text class="on" x="{x + _CELL / 2:.0f}" y="{y + 16:.0f}" '
                f'text-anchor="middle">{cell.label}</text>'
            )
    for number, name in ((1, "all-to-all"), (3, "all-to-all")):
        parts.append(f'<text x="{_LEFT + number * _STEP + _CELL + 44:.0f}" y="{_TOP - 6:.0f}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="tokens of two processes, sent to the processes of their experts and back"><style>{_STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>'
    )


def _columns() -> list[list[list[Cell]]]:
    """The cells of each column, by process."""
    tokens = [[Cell(p, t, expert) for t, expert in enumerate(chosen)] for p, chosen in enumerate(_CHOSEN)]
    in_order = [sorted(cells, key=lambda cell: cell.expert) for cells in tokens]
    arrived = [
        [cell for cells in in_order for cell in cells if cell.expert // _EACH == process] for process in range(2)
    ]
    computed = [sorted(cells, key=lambda cell: cell.expert) for cells in arrived]
    return [tokens, in_order, arrived, computed, tokens]


def _places(column: Sequence[Sequence[Cell]], number: int, gap: float) -> dict[Cell, tuple[float, float]]:
    x = _LEFT + number * _STEP
    return {
        cell: (x, _TOP + process * gap + row * _HIGH)
        for process, cells in enumerate(column)
        for row, cell in enumerate(cells)
    }
