"""Run a schedule: executor, stages, transports."""

from pipeloom.runtime.collectives import all_gather_bytes
from pipeloom.runtime.gradients import clip_by_norms, clip_grad_norm, gradient_norms
from pipeloom.runtime.loopback import LoopbackTransport
from pipeloom.runtime.mixed import MixedTransport
from pipeloom.runtime.pipeline import Pipeline
from pipeloom.runtime.transport import Channel, Incoming, Lane, Outgoing, Transport
from pipeloom.runtime.values import Layout
from pipeloom.runtime.worker import BLACKBOX_BYTES, RUNNABLE_OPS

__all__ = [
    "BLACKBOX_BYTES",
    "RUNNABLE_OPS",
    "Channel",
    "Incoming",
    "Lane",
    "Layout",
    "LoopbackTransport",
    "MixedTransport",
    "Outgoing",
    "Pipeline",
    "Transport",
    "all_gather_bytes",
    "clip_by_norms",
    "clip_grad_norm",
    "gradient_norms",
]
