"""Pipelines as data: actions, placements, schedules, programs and their rules. Only large schedules need numpy."""

from pipeloom.ir.action import COMMUNICATION_OPS, COMPUTE_OPS, Action, Op
from pipeloom.ir.check.checker import Checked, check, live_activations
from pipeloom.ir.data_axis import DataAxis, DataStrategy, Granularity
from pipeloom.ir.placement import Placement
from pipeloom.ir.schedule import Orders, Program, Schedule, WeightPolicy, dependencies, peer_of
from pipeloom.ir.skips import Skip, SkippingValue, routes
from pipeloom.ir.walk import dependency_order

__all__ = [
    "COMMUNICATION_OPS",
    "COMPUTE_OPS",
    "Action",
    "Checked",
    "DataAxis",
    "DataStrategy",
    "Granularity",
    "Op",
    "Orders",
    "Placement",
    "Program",
    "Schedule",
    "Skip",
    "SkippingValue",
    "WeightPolicy",
    "check",
    "dependencies",
    "dependency_order",
    "live_activations",
    "peer_of",
    "routes",
]
