"""Grids of tensor-parallel processes as arithmetic: which there are, who owns what, and what is sent. No torch."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product

import pytest

from pipeloom.errors import InputError
from pipeloom.parallel.placed import Place, Placed
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.tensor.grids.traffic import linear_traffic
from tests.pure.test_import_rule import modules_after

SHAPES = [GridShape("2d", 2), GridShape("2d", 3), GridShape("2.5d", 3, 2), GridShape("3d", 2), GridShape("3d", 3)]


@pytest.mark.parametrize(
    ("processes", "layout", "depth", "words"),
    [
        (6, "2d", None, "tp=6 with layout 2d: must be a square q * q. Use 4 or 9."),
        (9, "3d", None, "tp=9 with layout 3d: must be a cube l * l * l. Use 8 or 27."),
        (12, "2.5d", 2, "tp=12 with layout 2.5d and depth=2: must be depth * q * q. Use 8 or 18."),
        (12, "2.5d", 3, "depth=3 with layout 2.5d and tp=12: the grid is 2 x 2, and depth must be at most 2. Use"),
        (8, "2.5d", None, "depth=None with layout 2.5d: must be an integer of at least 1, such as 2."),
        (4, "2d", 2, "depth=2 has no effect with layout 2d. Remove it, or use layout 2.5d."),
        (4, "4d", None, "layout='4d': must be one of 2d, 2.5d, 3d."),
    ],
)
def test_numbers_of_processes_that_form_no_grid_are_refused(processes, layout, depth, words) -> None:
    with pytest.raises(InputError) as refused:
        GridShape.of(processes, layout, depth)
    assert str(refused.value).startswith(words)


def test_every_number_of_processes_is_a_grid_or_refused() -> None:
    for number in range(1, 200):
        for layout, depth in [("2d", None), ("3d", None), ("2.5d", 1), ("2.5d", 2), ("2.5d", 3)]:
            try:
                shape = GridShape.of(number, layout, depth)
            except InputError:
                continue
            assert math.prod(shape.axes.values()) == number


def places(shape: GridShape) -> list[Place]:
    """The places of all processes."""
    ranges = [range(degree) for degree in shape.axes.values()]
    return [Place(dict(zip(shape.axes, values, strict=True)), shape.axes) for values in product(*ranges)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_has_one_owner_and_processes_that_share_it_sum_its_gradient_if_they_have_parts(shape) -> None:
    side = shape.side
    found: list[tuple[Placed, int]] = [  # and how many processes hold an element
        (shape.weight((3 * side**2, 2 * side**2), shape.outer, shape.inner), shape.depth),
        (shape.weight((3 * side**2, 2 * side**2), shape.inner, shape.outer), shape.depth),
        (shape.weight((6 * side, side**2), shape.outer, shape.inner, (4 * side, side, side)), shape.depth),
        (shape.weight((3 * side + 1, side**2), shape.outer, shape.inner), shape.depth),  # padded
        (shape.vector(2 * side, shape.outer), shape.batch_blocks),
        (shape.vector(2 * side, shape.inner), shape.batch_blocks),
        (shape.positions(5, 2 * side), shape.batch_blocks),
    ]
    for how, copies in found:
        held: Counter[tuple[int, ...]] = Counter()
        owners: Counter[tuple[int, ...]] = Counter()
        for place in places(shape):
            for full, _, owned in how.pieces(place):
                for element in product(*(range(part.start, part.stop) for part in full)):
                    held[element] += 1
                    owners[element] += owned
        assert set(held) == set(product(*(range(size) for size in how.shape)))
        assert set(held.values()) == {copies}
        assert set(owners.values()) == {1}
        assert math.prod(shape.axes[axis] for axis in how.sum_over) == copies


@pytest.mark.parametrize("inward", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_layer_sends_what_the_papers_say(shape: GridShape, inward: bool) -> None:
    tokens, inputs, outputs = 1080, 72, 144
    forward, backward = linear_traffic(shape, tokens, inputs, outputs, 1, inward=inward).by_axis()
    side = shape.side
    if shape.layout == "3d":
        source, target = ("tp_k", "tp_j") if inward else ("tp_j", "tp_k")
        part = (side - 1) * tokens
        assert forward == {
            target: part * inputs / side**3,
            "tp_i": (side - 1) * inputs * outputs / side**3,
            source: part * outputs / side**3,
        }
        assert backward == {**{axis: 2 * size for axis, size in forward.items()}, source: part * outputs / side**3}
    else:
        assert forward == {"tp_column": tokens / shape.depth * inputs / side, "tp_row": inputs * outputs / side}
        assert backward == {axis: 2 * size for axis, size in forward.items()}


def test_formulae_load_no_torch(tmp_path) -> None:
    assert "torch" not in modules_after("import pipeloom.parallel.inside_stage", tmp_path)
