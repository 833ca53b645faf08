"""Which layers make a stage, and on how many ranks: PipeDream's partitioner, and DAPPLE's planner.

`measure` alone needs torch, and is not imported here.
"""

from pipeloom.plan.partition.dapple import SynchronousPlan, pivot_seconds, plan_synchronous
from pipeloom.plan.partition.in_flight import noam_period
from pipeloom.plan.partition.pipedream import Bottleneck, Partition, Stage, data_parallel, partition_layers
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
    "SynchronousPlan",
    "check_levels",
    "data_parallel",
    "noam_period",
    "parse_profile",
    "partition_layers",
    "pivot_seconds",
    "plan_synchronous",
    "shared_weights",
    "stream_plan",
    "synchronous_plan",
]
