"""The picture of the layouts inside a stage, for ``python docs/draw.py``: which rank holds which block of what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from pipeloom.parallel.tensor.grids.shape import GridShape

_COLOURS = ("#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2", "#999999")
_SIDE, _HEAD, _LEFT = 88.0, 34.0, 150.0
_COLUMNS = ("input", "weight of the first layer", "between the layers", "weight of the second layer", "output")
_STEP = 158.0
_STYLE = (
    ".pl{font:12px system-ui,sans-serif;color:#222;background:#fff}.pl text{fill:currentColor}.pl .paper{fill:#fff}"
    ".pl .on{fill:#111}.pl rect.cell{stroke:#222;stroke-width:.7}.pl .name{font-weight:600}"
    "@media(prefers-color-scheme:dark){.pl{color:#ddd;background:#16181c}.pl .paper{fill:#16181c}}"
)


class Table(NamedTuple):
    """A matrix cut into rows and columns: the ranks that hold each cell."""

    rows: int
    columns: int
    holders: dict[tuple[int, int], list[int]]


def layouts_picture() -> str:
    """Two linear layers of an MLP on the ranks of each layout."""
    rows = list(_rows())
    height = _HEAD + len(rows) * (_SIDE + 26)
    width = _LEFT + len(_COLUMNS) * _STEP
    parts = [f'<text x="{_LEFT + k * _STEP:.0f}" y="20">{title}</text>' for k, title in enumerate(_COLUMNS)]
    for number, (name, detail, tables) in enumerate(rows):
        y = _HEAD + number * (_SIDE + 26)
        parts.append(f'<text class="name" x="8" y="{y + 22:.0f}">{name}</text>')
        parts += [f'<text x="8" y="{y + 40 + 16 * k:.0f}">{line}</text>' for k, line in enumerate(detail)]
        for column, table in enumerate(tables):
            parts.append(_drawn(table, _LEFT + column * _STEP, y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pl" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'aria-label="blocks of activations and weights that each rank holds in every layout"><style>{_STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%"/>{"".join(parts)}</svg>'
    )


def _drawn(table: Table, x: float, y: float) -> str:
    wide, high = (_STEP - 22) / table.columns, _SIDE / table.rows
    found = []
    for row, column in product(range(table.rows), range(table.columns)):
        ranks = table.holders[row, column]
        left, top = x + column * wide, y + row * high
        colour = _COLOURS[ranks[0] % len(_COLOURS)] if len(ranks) == 1 else "#e8e8e8"
        found.append(
            f'<rect class="cell" x="{left:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{high:.1f}" fill="{colour}"/>'
            f'<text class="on" x="{left + wide / 2:.1f}" y="{top + high / 2 + 4:.1f}" text-anchor="middle">'
            f"{' '.join(map(str, ranks))}</text>"
        )
    return "".join(found)


def _rows() -> Iterator[tuple[str, list[str], list[Table]]]:
    everything, tokens = _split(1, 1, 2), _split(2, 1, 2, down=True)
    wide, high = _split(1, 2, 2), _split(2, 1, 2, down=True)
    yield "1d", ["tp 2"], [everything, wide, wide, high, everything]
    yield "1d, sequence", ["tp 2, rows are", "tokens"], [tokens, wide, wide, high, tokens]
    for layout, ranks, depth in (("2d", 4, None), ("2.5d", 8, 2), ("3d", 8, None)):
        shape = GridShape.of(ranks, layout, depth)
        sizes = " x ".join(map(str, shape.axes.values()))
        yield layout, [f"tp {ranks}: {sizes},", "rows are samples"], list(_on_grid(shape))
    zig_zag = Table(4, 1, {(0, 0): [0], (1, 0): [1], (2, 0): [1], (3, 0): [0]})
    yield "ring", ["cp 2, zig-zag, rows", "are tokens"], [zig_zag, everything, zig_zag, everything, zig_zag]
    yield "ulysses", ["and ring self-", "attention, cp 2"], [tokens, everything, tokens, everything, tokens]


def _split(rows: int, columns: int, ranks: int, *, down: bool = False) -> Table:
    """Cells of one rank each, or one cell of all ranks."""
    if rows * columns == 1:
        return Table(1, 1, {(0, 0): list(range(ranks))})
    return Table(rows, columns, {(k, 0) if down else (0, k): [k] for k in range(ranks)})


def _on_grid(shape: GridShape) -> Iterator[Table]:
    """Input, first weight, inner activations, second weight, output, as `GridShape` says where they lie."""
    axes = shape.axes
    places = [dict(zip(axes, found, strict=True)) for found in product(*map(range, axes.values()))]
    outer, inner = shape.outer, shape.inner
    square = (shape.input_blocks * shape.side,) * 2

    def activations(where: tuple[tuple[str, ...], str]) -> Table:
        return _table(places, axes, where[0], (where[1],))

    for source, target in ((outer, inner), (inner, outer)):
        yield activations(source)
        cuts = shape.weight(square, source, target).cuts
        yield _table(places, axes, cuts[1].axes, cuts[0].axes)
    yield activations(outer)


def _table(
    places: list[dict[str, int]], degrees: Mapping[str, int], down: tuple[str, ...], across: tuple[str, ...]
) -> Table:
    def index(place: Mapping[str, int], along: tuple[str, ...]) -> tuple[int, int]:
        number, size = 0, 1
        for axis in along:
            number, size = number * degrees[axis] + place[axis], size * degrees[axis]
        return number, size

    holders: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    rows = columns = 1
    for rank, place in enumerate(places):
        (row, rows), (column, columns) = index(place, down), index(place, across)
        holders[row, column].append(rank)
    return Table(rows, columns, dict(holders))
