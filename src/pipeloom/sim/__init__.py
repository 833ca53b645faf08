"""Predict a run: schedule or program, costs and network in, timeline out. Needs no torch."""

from pipeloom.sim.costs import Costs
from pipeloom.sim.costs_file import CostsFile, parse_costs
from pipeloom.sim.critical_path import critical_path
from pipeloom.sim.events import Transfer
from pipeloom.sim.network import Link, Network
from pipeloom.sim.simulator import measured_timeline, simulate
from pipeloom.sim.spans import Collective, Span
from pipeloom.sim.timeline import Timeline

__all__ = [
    "Collective",
    "Costs",
    "CostsFile",
    "Link",
    "Network",
    "Span",
    "Timeline",
    "Transfer",
    "critical_path",
    "measured_timeline",
    "parse_costs",
    "simulate",
]
