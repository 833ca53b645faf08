"""Records of several numbers: no call depends on the order of their fields, and no attribute is added by mistake."""

from __future__ import annotations

from dataclasses import fields

import pytest

from pipeloom.ir import DataAxis
from pipeloom.plan.cluster import Cluster, Device, NodeLinks, NodeNetwork
from pipeloom.plan.memory import LayerMemory, MemoryModel, MemoryRow, RankMemory
from pipeloom.train.checkpoint.manifest import Manifest
from pipeloom.transport.connect import Connection


@pytest.mark.parametrize(
    "record",
    [Cluster, DataAxis, Device, LayerMemory, Manifest, MemoryModel, MemoryRow, NodeLinks, NodeNetwork, RankMemory],
)
def test_fields_are_given_by_name_and_there_are_no_others(record: type) -> None:
    with pytest.raises(TypeError, match="positional argument"):
        record(*(None for _ in fields(record)))
    with pytest.raises((AttributeError, TypeError)):  # the latter of frozen ones with slots
        object.__new__(record).another = 1


@pytest.mark.parametrize("record", [Cluster, Connection, DataAxis, Device, MemoryModel, RankMemory])
def test_records_do_not_change(record: type) -> None:
    assert record.__dataclass_params__.frozen
