"""Public dataclasses refuse what is of another type than they declare, when they are made, in one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, Op
from pipeloom.parallel.mesh_shape import MeshShape
from pipeloom.parallel.offload.targets import OffloadActivations
from pipeloom.plan.partition import LayerProfile, Profile
from pipeloom.plan.slicing import LinearTime
from pipeloom.sim import Costs, Network
from pipeloom.sim.network import Link


def costs(**changes: Any) -> Costs:
    return Costs(**{"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, **changes})


def link(ranks: Any = frozenset({(0, 1)}), bytes_per_second: Any = 1.0) -> Link:
    return Link(ranks=ranks, bytes_per_second=bytes_per_second)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: costs(forward=[1.0, 1.0]), "forward of Costs is [1.0, 1.0]: it is a number, or a tuple of numbers"),
        (lambda: costs(forward="1"), "forward of Costs is '1': it is a number"),
        (lambda: costs(forward=None), "forward of Costs is None: it is a number"),
        (lambda: costs(forward=True), "forward of Costs is True: it is a number"),
        (lambda: costs(forward=np.ones(2)), "forward of Costs is array([1., 1.]): it is a number"),
        (lambda: costs(backward_input=(1.0, "x")), "backward_input[1] of Costs is 'x': it is a number"),
        (lambda: costs(overlap=None), "overlap of Costs is None: it is a number"),
        (lambda: costs(activation_bytes=3), "activation_bytes of Costs is 3: it is a tuple of numbers, or None"),
        (lambda: costs(units=(1, 1.5)), "units[1] of Costs is 1.5: it is a whole number"),
        (lambda: costs(slice_factors=((1.0,),)), "slice_factors of Costs is ((1.0,),): it is a tuple of a tuple of"),
        (lambda: costs(other=[1]), "other of Costs is [1]: it is a mapping of numbers, or tuples of numbers"),
        (lambda: costs(other={Op.STEP: "x"}), "other[STEP] of Costs is 'x': it is a number"),
        (
            lambda: costs(forward=(1.0,) * 4, units=(1, 1)),
            "costs are of different stages (forward has 4 entries, units has 2 entries)",
        ),
        (lambda: Network(latency_seconds=[[0, 1], [1, 0]]), "latency_seconds of Network is [[0, 1], [1, 0]]: it is a"),
        (lambda: Network(latency_seconds=((0, "x"), (1, 0))), "latency_seconds[0][1] of Network is 'x'"),
        (lambda: Network(links=(3,)), "links[0] of Network is 3: it is a Link"),
        (lambda: Network(overlap_communication=1), "overlap_communication of Network is 1: it is True or False"),
        (lambda: link(ranks=[(0, 1)]), "ranks of Link is [(0, 1)]: it is a frozenset of tuples of a whole number and"),
        (lambda: link(ranks=frozenset({(0, 1, 2)})), "ranks[...] of Link is (0, 1, 2): it is a tuple of a whole"),
        (lambda: link(bytes_per_second="x"), "bytes_per_second of Link is 'x': it is a number"),
        (lambda: DataAxis(degree="2"), "degree of DataAxis is '2': it is a whole number"),
        (
            lambda: DataAxis(degree=2, strategy="zero3"),
            "strategy of DataAxis is 'zero3': it is one of DataStrategy.DDP",
        ),
        (lambda: MeshShape.of({"dp": 1.5}), "mesh axis dp has degree 1.5: a degree is a count"),
        (lambda: MeshShape.of(None), "degrees of a mesh are None: they are a mapping"),
        (
            lambda: OffloadActivations("cpu", most="3"),
            "most of OffloadActivations is '3': it is a number, or a sequence",
        ),
        (lambda: OffloadActivations("cpu", beside=-1), "beside is -1: it is 0 or more"),
        (lambda: OffloadActivations("cpu", least_bytes=-1), "least_bytes is -1: it is 0 or more"),
        (lambda: LinearTime(base=()), "base has tokens []: there is one point at least"),
        (lambda: LinearTime(base=((8.0,),)), "base[0] of LinearTime is (8.0,): it is a tuple of a number and a number"),
        (lambda: LinearTime(base=((8.0, 1.0), (8.0, 2.0))), "base has tokens [8.0, 8.0]: there is one"),
        (lambda: Profile(("x",)), "layers[0] of Profile is 'x': it is a LayerProfile"),
        (lambda: Profile((LayerProfile("a", "x", 1, 1, 1),)), "forward_seconds of layer 0 of the profile is 'x'"),
    ],
)
def test_what_is_of_another_type_is_refused_when_it_is_made(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert costs(forward=np.float64(2), activation_bytes=(np.int64(3), np.float64(4))).forward == 2


@dataclass
class _Many:
    names: Sequence[str] = ()
    table: Mapping[str, int] | None = None
    word: Literal["a", "b"] = "a"
    pair: tuple[str, float] = ("x", 1.0)
    anything: Any = None

    def __post_init__(self) -> None:
        check_fields(self)


def test_all_kinds_of_types_are_looked_at() -> None:
    _Many(names=["x"], table={"a": 1, "b": 2}, word="b", pair=("y", 2), anything=object())
    for wrong, said in (
        ({"names": "text"}, "names of _Many is 'text': it is a sequence of texts"),
        ({"names": ["x", 1]}, r"names\[1\] of _Many is 1: it is text"),
        ({"table": {"a": "b", "c": "d"}}, r"table\[a\] of _Many is 'b': it is a whole number"),
        ({"word": "c"}, "word of _Many is 'c': it is one of a, b"),
        ({"pair": ("x",)}, r"pair of _Many is \('x',\): it is a tuple of text and a number"),
        ({"pair": (1, 1.0)}, r"pair\[0\] of _Many is 1: it is text"),
    ):
        with pytest.raises(InputError, match=said):
            _Many(**wrong)
