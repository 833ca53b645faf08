"""Where processes stand on named axes, and what is refused; no torch."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest

from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity
from pipeloom.parallel import AXES, DataParallel, MeshShape, Precision


def test_ranks_of_a_copy_are_neighbours_by_default() -> None:
    shape = MeshShape.of({"pp": 3, "dp": 2})
    assert shape.lines("pp") == ((0, 1, 2), (3, 4, 5))
    assert shape.lines("dp") == ((0, 3), (1, 4), (2, 5))
    assert shape.coordinates(4) == {"dp": 1, "pp": 1, "cp": 0, "tp": 0}
    assert str(shape) == "dp 2 x pp 3"


def test_the_order_is_the_users() -> None:
    shape = MeshShape.of({"pp": 3, "dp": 2}, order=("pp", "dp"))
    assert shape.lines("pp") == ((0, 2, 4), (1, 3, 5))
    assert shape.along("dp", 3) == (2, 3)
    assert shape.axes == ("pp", "dp", "cp", "tp")


@pytest.mark.parametrize("order", [AXES, ("tp", "pp", "dp"), ("tp", "cp", "dp", "pp")])
@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 3, "tp": 2}, {"tp": 4}, {}])
def test_places_and_processes_are_one_to_one(order: tuple[str, ...], degrees: dict[str, int]) -> None:
    shape = MeshShape.of(degrees, order=order)
    everybody = range(shape.num_processes)
    assert shape.num_processes == math.prod(degrees.values())
    places = [tuple(shape.coordinates(process).items()) for process in everybody]
    assert len(set(places)) == len(places)
    assert [shape.process(shape.coordinates(process)) for process in everybody] == list(everybody)
    for axis in AXES:
        lines = shape.lines(axis)
        assert sorted(itertools.chain(*lines)) == list(everybody)
        for line in lines:
            assert [shape.coordinates(process)[axis] for process in line] == list(range(shape.degree(axis)))
            assert all(shape.along(axis, process) == line for process in line)


def test_experts_divide_the_innermost_part_of_a_line() -> None:
    shape = MeshShape.of({"dp": 4, "tp": 2}, ep=2)
    assert str(shape) == "dp 4 x tp 2 with ep 2 along dp"
    assert shape.lines("ep") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shape.lines("edp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert shape.along_all(("ep", "tp"), 6) == (4, 5, 6, 7)
    assert (shape.degree("ep"), shape.degree("edp")) == (2, 2)


def test_expert_data_replicas_are_joint_over_dp_and_cp() -> None:
    shape = MeshShape.of({"dp": 4, "cp": 2}, ep=2)
    assert shape.along("ep", 3) == (1, 3)
    assert shape.along("edp", 3) == (2, 3, 6, 7)


@pytest.mark.parametrize("order", [AXES, ("tp", "cp", "dp", "pp")])
@pytest.mark.parametrize(("ep", "axes"), [(4, ("dp",)), (2, ("cp",)), (4, ("cp", "dp")), (8, ("dp", "cp"))])
def test_expert_lines_cover_all_processes(order: tuple[str, ...], ep: int, axes: tuple[str, ...]) -> None:
    shape = MeshShape.of({"pp": 2, "dp": 4, "cp": 2, "tp": 2}, order=order, ep=ep, expert_axes=axes)
    assert shape.degree("ep") * shape.degree("edp") == 8
    for axis in ("ep", "edp"):
        lines = shape.lines(axis)
        assert sorted(itertools.chain(*lines)) == list(range(32))
        for line in lines:
            assert [shape.coordinate(axis, process) for process in line] == list(range(shape.degree(axis)))
            assert all(shape.along(axis, process) == line for process in line)
            fixed = {(shape.coordinate("pp", process), shape.coordinate("tp", process)) for process in line}
            assert len(fixed) == 1


@pytest.mark.parametrize(("degrees", "processes", "rest"), [({"pp": 2, "dp": -1}, 8, 4), ({"dp": -1}, 3, 3)])
def test_minus_one_is_the_rest(degrees: dict[str, int], processes: int, rest: int) -> None:
    assert MeshShape.of(degrees, num_processes=processes).degree("dp") == rest


@pytest.mark.parametrize(
    ("degrees", "processes", "order", "words"),
    [
        ({"pp": 2, "dp": -1}, 5, AXES, r"a multiple of 2\. Start 6"),
        ({"pp": 4, "dp": -1}, 2, AXES, "Start 4"),
        ({"pp": -1, "dp": -1}, 4, AXES, "only one degree can be -1"),
        ({"dp": -1}, None, AXES, "-1 needs a number of processes"),
        ({"pp": 2, "dp": 2}, 3, AXES, r"needs 4 processes: there are 3\. Start 4 processes"),
        ({"pp": 0}, None, AXES, "degree 0"),
        ({"pp": -2}, None, AXES, "degree -2"),
        ({"qq": 2}, None, AXES, "'qq' is unknown"),
        ({"ep": 2}, None, AXES, "'ep' has no processes of its own"),
        ({}, None, ("pp", "pp"), "twice"),
        ({"tp": 2}, None, ("dp", "pp"), "is not in the order dp,pp"),
    ],
)
def test_what_is_no_mesh_is_refused_in_one_line(
    degrees: dict[str, int], processes: int | None, order: tuple[str, ...], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        MeshShape.of(degrees, num_processes=processes, order=order)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("ep", "axes", "words"),
    [
        (3, ("dp",), r"ep=3: must divide the 4 processes along dp=4 .* Use 1, 2 or 4, or other degrees"),
        (4, ("cp",), r"ep=4: must divide the 2 processes along cp=2"),
        (0, ("dp", "cp"), r"ep=0: must divide the 8 processes along dp=4 and cp=2"),
        (2, ("tp",), r"expert_axes=\('tp',\): must be"),
        (2, "dp", "expert_axes='dp': must be"),
        (2, (), "must be"),
    ],
)
def test_experts_that_do_not_divide_the_replicas_are_refused(ep: int, axes: tuple[str, ...], words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        MeshShape.of({"dp": 4, "cp": 2, "tp": 2}, ep=ep, expert_axes=axes)
    assert "\n" not in str(caught.value)


def test_options_become_a_data_axis() -> None:
    assert DataParallel().axis(2) == DataAxis(degree=2)
    asked = DataParallel("zero3", granularity="chunk").axis(4, separate_master=True)
    assert asked == DataAxis(degree=4, strategy=DataStrategy.ZERO3, granularity=Granularity.CHUNK, separate_master=True)
    assert DataParallel.of("zero2") == DataParallel("zero2")
    assert DataParallel.of(None) == DataParallel()
    assert Precision.of("bf16") == Precision("bf16", gradients="float32")
    assert Precision.of(None).has_masters is False


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: DataParallel("zero4"), "data strategy='zero4': unknown. Use one of ddp, parameter-server"),
        (lambda: DataParallel("ddp", granularity="chunk"), "Use 'step', or strategy zero2 or zero3"),
        (
            lambda: DataParallel("zero2", granularity="week"),
            "granularity='week': unknown. Use one of step, chunk, microbatch",
        ),
        (lambda: Precision("fp8"), "precision='fp8': unknown. Use one of fp32, bf16, fp16"),
        (lambda: Precision("bf16", gradients="half"), "Use one of float32, same"),
    ],
)
def test_unknown_options_are_refused_in_one_line(build: object, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        build()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_options_and_shapes_need_no_torch() -> None:
    code = "import sys, pipeloom as pl; pl.DataParallel, pl.Precision; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
