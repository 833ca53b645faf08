"""How parameters lie: owned rectangles tile the parameter, blocks joined give it back, padding is no part of it."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeloom.errors import InputError
from pipeloom.models import init_parameters
from pipeloom.parallel.placed import Cut, Place, Placed, Section, even, place_parameter, placed, placed_block

AXES = ("row", "column", "depth")


def places(degrees: dict[str, int]) -> list[Place]:
    return [
        Place(dict(zip(degrees, found, strict=True)), degrees)
        for found in product(*(range(degree) for degree in degrees.values()))
    ]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Placed, dict[str, int]]:
    """A parameter of one to three dimensions, cut along some of them by different axes, with uneven sections."""
    degrees = {axis: draw(st.integers(1, 4)) for axis in draw(st.permutations(AXES))}
    free, cuts, shape = list(degrees), {}, []
    for dim in range(draw(st.integers(1, 3))):
        axes = tuple(free[: draw(st.integers(0, len(free)))])
        free = free[len(axes) :]
        members = prod(degrees[axis] for axis in axes)
        divisors = [number for number in range(1, members + 1) if members % number == 0]
        sections = tuple(
            Section(draw(st.integers(1, 9)), draw(st.sampled_from(divisors))) for _ in range(draw(st.integers(1, 3)))
        )
        shape.append(sum(section.size for section in sections))
        if axes:
            cuts[dim] = Cut(axes, sections)
    how = Placed(tuple(shape), cuts)
    sizes = {dim: max(how.runs(dim, place)[1] for place in places(degrees)) for dim in cuts}
    return Placed(tuple(shape), cuts, padded=sizes if draw(st.booleans()) else {}), degrees


@given(layouts())
def test_owned_rectangles_are_the_parameter_each_element_once(found: tuple[Placed, dict[str, int]]) -> None:
    how, degrees = found
    owners = torch.zeros(how.shape, dtype=torch.int64)
    for place in places(degrees):
        for there, here, owned in how.pieces(place):
            assert [s.stop - s.start for s in there] == [s.stop - s.start for s in here]
            owners[there] += owned
    assert (owners == 1).all()


@given(layouts())
def test_blocks_of_a_parameter_joined_are_the_parameter(found: tuple[Placed, dict[str, int]]) -> None:
    how, degrees = found
    full = torch.arange(1, prod(how.shape) + 1).view(how.shape)
    for owned_only in (False, True):
        joined = torch.zeros_like(full)
        for place in places(degrees):
            block = how.cut(full, place)
            assert tuple(block.shape) == how.local_shape(place)
            how.join(block, place, joined, owned_only=owned_only)
        assert torch.equal(joined, full)


@given(layouts())
def test_padding_is_zero_and_in_no_rectangle(found: tuple[Placed, dict[str, int]]) -> None:
    how, degrees = found
    for place in places(degrees):
        block = how.cut(torch.ones(how.shape), place)
        inside = torch.zeros(block.shape, dtype=torch.bool)
        for _, here, _ in how.pieces(place):
            inside[here] = True
        assert torch.equal(block, inside.float())


def test_heads_of_a_fused_weight_and_one_key_head_for_two_ranks() -> None:
    how = Placed((8,), {0: Cut(("tp",), (Section(4, 2), Section(2, 1), Section(2, 1)))}, sum_over=("tp",))
    full = torch.arange(8)
    blocks = [how.cut(full, place).tolist() for place in places({"tp": 2})]
    assert blocks == [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]
    assert [[run.owned for run in how.runs(0, place)[0]] for place in places({"tp": 2})] == [
        [True, True, True],
        [True, False, False],
    ]


def test_a_padded_vocabulary() -> None:
    how = Placed((5, 2), {0: even(5, 4, ("tp",))}, padded={0: 2})
    blocks = [how.cut(torch.ones(5, 2), place)[:, 0].tolist() for place in places({"tp": 4})]
    assert blocks == [[1, 1], [1, 1], [1, 0], [0, 0]]


def test_a_parameter_says_how_it_lies_and_a_wrong_block_is_refused() -> None:
    how, place = Placed((4, 6), {1: even(6, 2, ("tp",))}), Place({"tp": 1}, {"tp": 2})
    parameter = nn.Parameter(torch.zeros(4, 3))
    assert placed(parameter) is None
    place_parameter(parameter, how, place)
    assert placed(parameter) is how
    assert placed_block(parameter) == (how, place)
    with pytest.raises(InputError, match=r"shape \[4, 6\]: its block of \[4, 6\] has shape \[4, 3\] here"):
        place_parameter(nn.Parameter(torch.zeros(4, 6)), how, place)
    with pytest.raises(InputError, match=r"shape \[3, 6\] for a parameter of shape \[4, 6\]"):
        how.cut(torch.zeros(3, 6), place)


@given(layouts())
def test_every_layout_starts_from_the_same_values(found: tuple[Placed, dict[str, int]]) -> None:
    how, degrees = found

    class Plain(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(shape))

    plain = Plain(how.shape)
    init_parameters(plain, seed=5)
    joined = torch.zeros(how.shape)
    for place in places(degrees):
        cut = Plain(how.local_shape(place))
        place_parameter(cut.weight, how, place)
        init_parameters(cut, seed=5)
        how.join(cut.weight.detach(), place, joined)
    assert torch.equal(joined, plain.weight.detach())
