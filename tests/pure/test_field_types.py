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
from pipeloom.parallel.options import OffloadActivations
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
        (lambda: costs(forward=[1.0, 1.0]), "Costs.forward=[1.0, 1.0]: must be a number, or a tuple of numbers"),
        (lambda: costs(forward="1"), "Costs.forward='1': must be a number"),
        (lambda: costs(forward=None), "Costs.forward=None: must be a number"),
        (lambda: costs(forward=True), "Costs.forward=True: must be a number"),
        (lambda: costs(forward=np.ones(2)), "Costs.forward=array([1., 1.]): must be a number"),
        (lambda: costs(backward_input=(1.0, "x")), "Costs.backward_input[1]='x': must be a number"),
        (lambda: costs(overlap=None), "Costs.overlap=None: must be a number"),
        (lambda: costs(activation_bytes=3), "Costs.activation_bytes=3: must be a tuple of numbers, or None"),
        (lambda: costs(units=(1, 1.5)), "Costs.units[1]=1.5: must be an integer"),
        (lambda: costs(slice_factors=((1.0,),)), "Costs.slice_factors=((1.0,),): must be a tuple of a tuple of"),
        (lambda: costs(other=[1]), "Costs.other=[1]: must be a mapping of numbers, or tuples of numbers"),
        (lambda: costs(other={Op.STEP: "x"}), "Costs.other[STEP]='x': must be a number"),
        (
            lambda: costs(forward=(1.0,) * 4, units=(1, 1)),
            "costs are of different stages (forward has 4 entries, units has 2 entries)",
        ),
        (lambda: Network(latency_seconds=[[0, 1], [1, 0]]), "Network.latency_seconds=[[0, 1], [1, 0]]: must be a"),
        (lambda: Network(latency_seconds=((0, "x"), (1, 0))), "Network.latency_seconds[0][1]='x': must be a number"),
        (lambda: Network(links=(3,)), "Network.links[0]=3: must be a Link"),
        (lambda: Network(overlap_communication=1), "Network.overlap_communication=1: must be True or False"),
        (lambda: link(ranks=[(0, 1)]), "Link.ranks=[(0, 1)]: must be a frozenset of tuples of an integer and"),
        (lambda: link(ranks=frozenset({(0, 1, 2)})), "Link.ranks[...]=(0, 1, 2): must be a tuple of an"),
        (lambda: link(bytes_per_second="x"), "Link.bytes_per_second='x': must be a number"),
        (lambda: DataAxis(degree="2"), "DataAxis.degree='2': must be an integer"),
        (
            lambda: DataAxis(degree=2, strategy="zero3"),
            "DataAxis.strategy='zero3': must be one of DataStrategy.DDP",
        ),
        (lambda: MeshShape.of({"dp": 1.5}), "mesh axis dp has degree 1.5: must be an integer of at least 1"),
        (lambda: MeshShape.of(None), "degrees=None: must be a mapping"),
        (
            lambda: OffloadActivations("cpu", most="3"),
            "OffloadActivations.most='3': must be a number, or a sequence",
        ),
        (lambda: OffloadActivations("cpu", beside=-1), "beside=-1: must be at least 0"),
        (lambda: OffloadActivations("cpu", least_bytes=-1), "least_bytes=-1: must be at least 0"),
        (lambda: LinearTime(base=()), "base has tokens []: needs at least one point"),
        (lambda: LinearTime(base=((8.0,),)), "LinearTime.base[0]=(8.0,): must be a tuple of a number and a number"),
        (lambda: LinearTime(base=((8.0, 1.0), (8.0, 2.0))), "base has tokens [8.0, 8.0]: needs at least one"),
        (lambda: Profile(("x",)), "Profile.layers[0]='x': must be a LayerProfile"),
        (
            lambda: Profile((LayerProfile("a", "x", 1, 1, 1),)),
            "the profile: layers[0].forward_seconds='x'",
        ),
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
        ({"names": "text"}, "_Many.names='text': must be a sequence of strings"),
        ({"names": ["x", 1]}, r"_Many.names\[1\]=1: must be a string"),
        ({"table": {"a": "b", "c": "d"}}, r"_Many.table\[a\]='b': must be an integer"),
        ({"word": "c"}, "_Many.word='c': must be one of a, b"),
        ({"pair": ("x",)}, r"_Many.pair=\('x',\): must be a tuple of a string and a number"),
        ({"pair": (1, 1.0)}, r"_Many.pair\[0\]=1: must be a string"),
    ):
        with pytest.raises(InputError, match=said):
            _Many(**wrong)
