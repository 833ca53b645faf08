"""Every collective of an `Axis`, in each of its forms: threads, shared memory, and a process group."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from pipeloom.errors import PeerLost
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.axis_forms import ChannelAxis, GroupAxis
from tests.cpu.pairwise import of_grid
from tests.cpu.ranks import run_ranks

FORMS = ("threads", "shared memory", "group")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
# Below and above the size from which an all-reduce is made in pieces, and not a multiple of any number of members.
SIZES = (1, 5, 40_001)
OK = "ok"


def own(coordinate: int, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """What a member has: small whole numbers, whose sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(100 * seed + coordinate)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def same(found: Sequence[Tensor] | Tensor, wanted: Sequence[Tensor] | Tensor) -> None:
    pairs = [(found, wanted)] if isinstance(found, Tensor) else list(zip(found, wanted, strict=True))
    for one, other in pairs:
        assert isinstance(other, Tensor)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one, other)


def check_sums(axis: Axis, dtype: torch.dtype) -> None:
    members = range(axis.degree)
    for size in SIZES:
        values = [own(c, size, dtype=dtype) for c in members]
        mine = values[axis.index].clone()
        total = torch.stack(values).sum(0).to(dtype)
        found = axis.all_reduce(mine)
        same(found, total)
        found.zero_()  # belongs to the caller
        same(mine, values[axis.index])
        same(axis.all_reduce(mine, "max"), torch.stack(values).amax(0))
        for target in members:
            sum_there = axis.reduce(mine, target)
            assert (sum_there is None) == (target != axis.index)
            if sum_there is not None:
                same(sum_there, total)
        values = [own(c, 2 * axis.degree, size % 1000 + 1, dtype=dtype) for c in members]
        total = torch.stack(values).sum(0).to(dtype)
        same(axis.reduce_scatter(values[axis.index]), total.chunk(axis.degree)[axis.index])
        across = values[axis.index].t()  # not contiguous
        same(axis.reduce_scatter(across, 1), total.t().chunk(axis.degree, 1)[axis.index])
        same(axis.all_reduce(across), total.t())


def check_moves(axis: Axis, dtype: torch.dtype) -> None:
    members, degree, index = range(axis.degree), axis.degree, axis.index
    for width in (1, 3, 9000):
        values = [own(c, 2, width, dtype=dtype) for c in members]
        for dim in (0, 1):
            same(axis.all_gather(values[index], dim), torch.cat(values, dim))
        same(axis.all_gather(values[index].t(), 1), torch.cat([value.t() for value in values], 1))
        for source in members:
            same(axis.broadcast(values[index], source), values[source])
        first, second = axis.start_broadcast(values[index], 0), axis.start_broadcast(values[index] + 1, degree - 1)
        same(first(), values[0])
        same(second(), values[degree - 1] + 1)
        # Member a sends a + 2 b rows to member b; some pieces are empty.
        pieces = [[own(a, (a + 2 * b) % 4, width, dtype=dtype, seed=b) for b in members] for a in members]
        arriving = [pieces[a][index] for a in members]
        same(axis.all_to_all(pieces[index]), arriving)
        same(axis.all_to_all(pieces[index], [piece.shape for piece in arriving]), arriving)


def check_shifts(axis: Axis, dtype: torch.dtype) -> None:
    degree, index = axis.degree, axis.index
    sent = [[own(c, 3, 5, dtype=dtype), own(c, 20_000, seed=1)] for c in range(degree)]
    for by in (1, -1, degree, 2 * degree + 1):
        same(axis.shift(sent[index], by)(), sent[(index - by) % degree])
    flying = [axis.shift(sent[index], 1), axis.shift([2 * value for value in sent[index]], 1)]
    computed = own(index, 4, dtype=dtype) + 1
    same(flying[0](), sent[(index - 1) % degree])
    same(flying[1](), [2 * value for value in sent[(index - 1) % degree]])
    same(computed, own(index, 4, dtype=dtype) + 1)


def check_bits(axis: Axis) -> None:
    """Sums of values whose order counts: equal in every bit on all members."""
    for size in (7, 5000, 40_001):
        x = torch.randn(size, generator=torch.Generator().manual_seed(axis.index)) * 10.0 ** (3 * axis.index)
        sums = axis.all_gather(axis.all_reduce(x).unsqueeze(0))
        assert all(torch.equal(sums[0], row) for row in sums)
        if isinstance(axis, ChannelAxis):
            total, *others = axis.all_gather(x.unsqueeze(0))
            for other in others:
                total = total + other
            assert torch.equal(sums[0], total)


def check_counts(axis: Axis) -> None:
    axis.meter.traffic.clear()
    x, n, t = torch.ones(12, 5), 240, axis.degree
    axis.all_reduce(x), axis.all_gather(x), axis.reduce_scatter(x), axis.broadcast(x, 0), axis.shift([x])()
    axis.all_to_all([x] * t), axis.reduce(x, 0)
    found = {kind: (traffic.calls, traffic.num_bytes) for (_, kind), traffic in axis.meter.traffic.items()}
    each = {"all_reduce": 2 * (t - 1) * n // t, "reduce_scatter": (t - 1) * n // t, "broadcast": n, "reduce": n}
    each |= {"all_gather": (t - 1) * n, "all_to_all": (t - 1) * n, "shift": n}
    assert found == {kind: (1, size) for kind, size in each.items()}


def check_all(axis: Axis) -> str:
    for dtype in DTYPES:
        check_sums(axis, dtype)
        check_moves(axis, dtype)
        check_shifts(axis, dtype)
    check_bits(axis)
    check_counts(axis)
    return OK


def between_processes(rank: int, form: str, function: Callable[[Axis], Any]) -> Any:
    with pl.Mesh(tp=dist.get_world_size()) as mesh:
        if form == "shared memory":
            axis = mesh.axis("tp")
            assert isinstance(axis, ChannelAxis)
            return function(axis)
        order = list(reversed(range(mesh.members.size)))  # coordinates are not ranks in the group
        return function(GroupAxis("tp", mesh.group("tp"), order))


def between_threads(degree: int, function: Callable[[Axis], Any]) -> list[Any]:
    return pl.run_threads(degree, lambda: function(pl.Mesh(tp=degree).axis("tp")), timeout_seconds=120.0)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_every_collective(form: str, degree: int) -> None:
    if form == "threads":
        found = between_threads(degree, check_all)
    else:
        found = run_ranks(between_processes, degree, form, check_all)
    assert found == [OK] * degree


CALLS: dict[str, Callable[[Axis], Any]] = {
    "all_reduce": lambda axis: axis.all_reduce(torch.ones(8)),
    "large all_reduce": lambda axis: axis.all_reduce(torch.ones(100_000)),
    "all_gather": lambda axis: axis.all_gather(torch.ones(8)),
    "reduce_scatter": lambda axis: axis.reduce_scatter(torch.ones(12)),
    "all_to_all": lambda axis: axis.all_to_all([torch.ones(2)] * axis.degree),
    "broadcast": lambda axis: axis.broadcast(torch.ones(8), axis.degree - 1),
}


def die(rank: int, form: str, call: str, told: Any) -> None:
    """The last coordinate ends between two collectives; the others say what they get."""

    def run(axis: Axis) -> None:
        CALLS[call](axis)
        if axis.index == axis.degree - 1:
            os._exit(0)
        try:
            for _ in range(3):  # a small message may leave before its reader has gone
                CALLS[call](axis)
        except PeerLost as lost:
            told.send(str(lost))
        os._exit(0)

    between_processes(rank, form, run)


@pytest.mark.parametrize(("form", "call", "degree"), of_grid(FORMS[1:], CALLS, [2, 3]), ids=str)
def test_a_member_that_dies_is_noticed_by_all_others(form: str, call: str, degree: int) -> None:
    reader, writer = get_context("fork").Pipe(duplex=False)
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(die, degree, form, call, writer, timeout_seconds=60.0)
    for _ in range(degree - 1):
        assert reader.poll(5.0)
        assert "ended" in reader.recv()
    reader.close(), writer.close()


@pytest.mark.parametrize("call", CALLS)
def test_a_thread_that_fails_ends_the_collectives_of_the_others(call: str) -> None:
    lost: list[str] = []

    def run(axis: Axis) -> None:
        CALLS[call](axis)
        if axis.index == 2:
            raise ValueError("fails")
        try:
            CALLS[call](axis)
        except PeerLost as error:
            lost.append(str(error))
            raise

    with pytest.raises(ValueError, match="fails"):
        between_threads(3, run)
    assert len(lost) == 2  # of rank 2, or of the other, which stopped for it
    assert all(re.fullmatch("rank [012] stopped", error) for error in lost)


def _coordinates(mesh: pl.Mesh, names: tuple[str, ...]) -> list[tuple[int, ...]]:
    """What the members of a joined axis are, in its order, as each says of itself."""
    place = {**{axis: mesh.coordinate(axis) for axis in ("pp", "dp", "cp", "tp")}, **mesh.place.coordinates}
    mine = torch.tensor([place[axis] for axis in ("pp", "dp", "cp", *mesh.place.degrees)])
    return [tuple(row) for row in mesh.axis(*names).all_gather(mine[None]).tolist()]


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp"), ("cp", "tp"), ("dp", "cp", "tp")])
def test_several_axes_form_one_whose_last_is_the_fastest(names: tuple[str, ...]) -> None:
    def work() -> None:
        with pl.Mesh(dp=2, cp=2, tp=2) as mesh:
            own = {axis: mesh.coordinate(axis) for axis in ("dp", "cp", "tp")}
            wanted = [
                (0, *(dict(zip(names, values, strict=True)).get(axis, own[axis]) for axis in ("dp", "cp", "tp")))
                for values in product((0, 1), repeat=len(names))
            ]
            assert _coordinates(mesh, names) == wanted
            assert mesh.axis(*names).name == "+".join(names)

    pl.run_threads(8, work)


@pytest.mark.parametrize("names", [("tp_row", "tp_column"), ("tp_column", "tp_row")])
def test_parts_of_an_axis_form_axes(names: tuple[str, ...]) -> None:
    def work() -> None:
        with pl.Mesh(pp=2, tp=6) as mesh:
            mesh.divide(tp_row=2, tp_column=3)
            degrees, here = {"tp_row": 2, "tp_column": 3}, mesh.coordinate("pp")
            wanted = []
            for values in product(*(range(degrees[name]) for name in names)):
                at = dict(zip(names, values, strict=True))
                wanted.append((here, 0, 0, at["tp_row"], at["tp_column"]))
            assert _coordinates(mesh, names) == wanted
            assert mesh.axis("tp_row").degree == 2
            assert mesh.axis("tp_column").degree == 3
            assert mesh.coordinate("tp") == 3 * mesh.place.coordinates["tp_row"] + mesh.place.coordinates["tp_column"]

    pl.run_threads(12, work)
