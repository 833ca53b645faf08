"""Predict a run: schedule or program, costs and network in, timeline out. Needs no torch."""

from pipeloom.sim.costs import Costs, Network
from pipeloom.sim.costs_file import CostsFile, parse_costs
from pipeloom.sim.simulator import simulate
from pipeloom.sim.timeline import Span, Timeline, critical_path, measured_timeline

__all__ = [
    "Costs",
    "CostsFile",
    "Network",
    "Span",
    "Timeline",
    "critical_path",
    "measured_timeline",
    "parse_costs",
    "simulate",
]
