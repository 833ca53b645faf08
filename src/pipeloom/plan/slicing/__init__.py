"""Slices of a sequence and pieces of a batch: costs, the best cuts, and the time per step.

`measure_slices` needs torch and is not imported here.
"""

from pipeloom.plan.slicing.scheduled_slices import scheduled_timeline, slice_for_schedule, slicing_timeline
from pipeloom.plan.slicing.slice_costs import LinearTime, Sample, SliceCosts, SliceTime, fit, parse_slice_costs
from pipeloom.plan.slicing.slicer import Slicing, check_sizes, peak_tokens, slice_batch, uniform

__all__ = [
    "LinearTime",
    "Sample",
    "SliceCosts",
    "SliceTime",
    "Slicing",
    "check_sizes",
    "fit",
    "parse_slice_costs",
    "peak_tokens",
    "scheduled_timeline",
    "slice_batch",
    "slice_for_schedule",
    "slicing_timeline",
    "uniform",
]
