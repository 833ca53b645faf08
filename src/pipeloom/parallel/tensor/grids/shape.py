"""`GridShape`: how tensors lie on a grid of tensor-parallel processes, as arithmetic. No torch here.

    layout   processes     axes                              activations [batch, tokens, width]
    2d       q * q         tp_row, tp_column                 batch by tp_row; width by tp_column
    2.5d     d * q * q     tp_depth, tp_row, tp_column       batch by tp_depth and tp_row; width by tp_column
    3d       l * l * l     tp_i, tp_j, tp_k                  batch by tp_i and tp_j; width by tp_k     `outer`
                                                             batch by tp_i and tp_k; width by tp_j     `inner`

Optimus (arXiv:2104.05343), Tesseract (arXiv:2105.14500) and 3D tensor parallelism (arXiv:2105.14450). With 3d a layer
swaps two axes: qkv, the first layer of an MLP and the head take activations from `outer` to `inner`, the second layers
take them back. With 2d and 2.5d both are the same.

Weights [outputs, inputs] are cut along both dimensions. Gains of norms, biases and learned positions are cut along the
width alone, and all processes that hold the same elements keep them. (Optimus keeps them in row 0 and sends them to the
others in each forward.) Each has the gradient of its own tokens: the sum is taken once per step, see `Placed.sum_over`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from pipeloom.errors import InputError
from pipeloom.parallel.placed import Cut, Placed, Section

GridLayout = Literal["2d", "2.5d", "3d"]


class Activations(NamedTuple):
    """How activations lie.

    Attributes:
        batch: axes that cut the batch; the last one varies fastest.
        width: axis that cuts the features.
    """

    batch: tuple[str, ...]
    width: str


_GRID = Activations(("tp_row",), "tp_column")
_DEEP = Activations(("tp_depth", "tp_row"), "tp_column")
_OUTER = Activations(("tp_i", "tp_j"), "tp_k")
_INNER = Activations(("tp_i", "tp_k"), "tp_j")


@dataclass(frozen=True)
class GridShape:
    """A layout of a number of processes. Made by `of`.

    Attributes:
        layout: "2d", "2.5d" or "3d".
        side: q or l: into how many blocks a width is cut.
        depth: d of 2.5d, else 1.
    """

    layout: GridLayout
    side: int
    depth: int = 1

    @classmethod
    def of(cls, num_processes: int, layout: GridLayout, depth: int | None = None) -> "GridShape":
        """The grid of `num_processes`.

        Args:
            depth: d of layout 2.5d, from 1 to q.

        Raises:
            InputError: the number of processes is not of the layout's form, or `depth` does not fit.
        """
        if layout not in get_args(GridLayout):
            raise InputError(f"layout={layout!r}: must be one of {', '.join(get_args(GridLayout))}.")
        if layout != "2.5d":
            if depth is not None:
                raise InputError(f"depth={depth} has no effect with layout {layout}. Remove it, or use layout 2.5d.")
            power, form = (2, "a square q * q") if layout == "2d" else (3, "a cube l * l * l")
            return cls(
                layout, _root(num_processes, power, 1, f"tp={num_processes} with layout {layout}: must be {form}")
            )
        if depth is None or type(depth) is not int or depth < 1:
            raise InputError(f"depth={depth!r} with layout 2.5d: must be an integer of at least 1, such as 2.")
        what = f"tp={num_processes} with layout 2.5d and depth={depth}: must be depth * q * q"
        side = _root(num_processes, 2, depth, what)
        if depth > side:
            raise InputError(
                f"depth={depth} with layout 2.5d and tp={num_processes}: the grid is {side} x {side}, and depth must "
                f"be at most {side}. Use tp={depth**3}, or a smaller depth."
            )
        return cls(layout, side, depth)

    @property
    def axes(self) -> dict[str, int]:
        """Degrees of the axes, outermost first, as `Mesh.divide` takes them."""
        if self.layout == "3d":
            return {"tp_i": self.side, "tp_j": self.side, "tp_k": self.side}
        grid = {"tp_row": self.side, "tp_column": self.side}
        return grid if self.layout == "2d" else {"tp_depth": self.depth, **grid}

    @property
    def outer(self) -> Activations:
        """Activations between blocks of layers, such as the residual stream."""
        return {"2d": _GRID, "2.5d": _DEEP, "3d": _OUTER}[self.layout]

    @property
    def inner(self) -> Activations:
        """Activations within a block of layers, such as attention heads; and logits."""
        return {"2d": _GRID, "2.5d": _DEEP, "3d": _INNER}[self.layout]

    @property
    def batch_blocks(self) -> int:
        """Into how many blocks the batch is cut."""
        return self.side**2 if self.layout == "3d" else self.depth * self.side

    @property
    def input_blocks(self) -> int:
        """Into how many blocks the input features of a weight are cut."""
        return self.side**2 if self.layout == "3d" else self.side

    def weight(
        self, shape: tuple[int, int], source: Activations, target: Activations, sections: Sequence[int] | None = None
    ) -> Placed:
        """How the weight [outputs, inputs] of a linear layer lies.

        Args:
            source, target: `outer` and `inner`, or the other way round.
            sections: sizes of parts of the outputs that are cut one by one, such as queries, keys and values.
                None: the outputs are one, and may be padded.
        """
        inputs = (source.width, "tp_i") if self.layout == "3d" else ("tp_row",)
        outputs = tuple(Section(size, self.side) for size in sections or shape[:1])
        cuts = {0: Cut((target.width,), outputs), 1: Cut(inputs, (Section(shape[1], self.input_blocks),))}
        return Placed(shape, cuts, self._depth_axes, {0: -(-shape[0] // self.side)} if shape[0] % self.side else {})

    def vector(self, size: int, where: Activations, sections: Sequence[int] | None = None) -> Placed:
        """How the gain or bias of activations lies; see `weight` for `sections`."""
        cut = Cut((where.width,), tuple(Section(part, self.side) for part in sections or (size,)))
        return Placed((size,), {0: cut}, where.batch, {0: -(-size // self.side)} if size % self.side else {})

    def positions(self, length: int, width: int) -> Placed:
        """How learned positions [length, width] lie."""
        return Placed((length, width), {1: Cut((self.outer.width,), (Section(width, self.side),))}, self.outer.batch)

    @property
    def _depth_axes(self) -> tuple[str, ...]:
        return ("tp_depth",) if self.layout == "2.5d" else ()

    def check_divides(self, size: int, by: int, what: str, where: str = "") -> None:
        """Raises InputError where `size` is not a multiple of `by`: `what`, such as "width", of the layer `where`."""
        if size % by:
            lower = size // by * by
            fits = f"{lower} or {lower + by}" if lower else str(by)
            whose = f" of {where}" if where else ""
            raise InputError(f"{what}={size}{whose} with layout {self}: must be a multiple of {by}. Use {fits}.")

    def __str__(self) -> str:
        return f"{self.layout} ({' x '.join(str(degree) for degree in self.axes.values())})"


def _root(number: int, power: int, factor: int, what: str) -> int:
    """The root of `number / factor`; raises InputError where it is not an integer."""
    lower: int = math.floor((number / factor) ** (1 / power) + 1e-9)
    if lower < 1 or factor * lower**power != number:
        fits = [str(factor * root**power) for root in (lower, lower + 1) if root > 0]
        raise InputError(f"{what}. Use {' or '.join(fits)}.")
    return lower
