"""Layers and ranks per stage: PipeDream's partitioner and DAPPLE's planner."""

from pipeloom.plan.partition.dapple import SynchronousPartition, partition_synchronous, pivot_seconds
from pipeloom.plan.partition.graph_text import parse_graph
from pipeloom.plan.partition.pipedream import Bottleneck, Partition, Stage, data_parallel, noam_period, partition_layers
from pipeloom.plan.partition.plans import shared_weights, stream_plan, synchronous_plan
from pipeloom.plan.partition.problem import Form, Level, Problem, check_levels
from pipeloom.plan.partition.profile import LayerProfile, Profile, parse_profile

__all__ = [
    "Bottleneck",
    "Form",
    "LayerProfile",
    "Level",
    "Partition",
    "Problem",
    "Profile",
    "Stage",
    "SynchronousPartition",
    "check_levels",
    "data_parallel",
    "noam_period",
    "parse_graph",
    "parse_profile",
    "partition_layers",
    "partition_synchronous",
    "pivot_seconds",
    "shared_weights",
    "stream_plan",
    "synchronous_plan",
]
