"""The parts of the benchmark: which systems run at which sizes, and which step times are divided."""

from __future__ import annotations

from typing import Any, NamedTuple

from benchmarks.tensor_parallel.layouts import GridSizes
from benchmarks.tensor_parallel.subject import Entry
from benchmarks.tensor_parallel.workload import Sizes

ONE_THREAD = "1 process, 1 thread"


class Part(NamedTuple):
    """A part.

    Attributes:
        sizes: by label.
        entries: systems by name.
        comparisons: whose step times are divided.
        emulates: whether processes stand for devices of their own, although they share cores: then their CPU times
            are compared, with the time of links added.
    """

    sizes: dict[str, Any]
    entries: dict[str, Entry]
    comparisons: list[tuple[str, str]]
    emulates: bool = False

    @property
    def compared(self) -> dict[str, str]:
        """What is divided, with the headings of its ratios; the first is the headline."""
        if self.emulates:
            return {"emulated 1e+08": "0.1 GB/s", "emulated 1e+09": "1 GB/s", "busiest": "CPU time"}
        return {"seconds": "step time", "cpu": "CPU time"}


_WITH_SEQUENCE = {"sequence": True}
_PP = {"pp": 2}

PARTS = {
    "1d": Part(
        {
            "width 256, 4x256 tokens, M=2": Sizes(width=256, heads=8, blocks=4, num_microbatches=2),
            "width 1024, 1x256 tokens, M=1": Sizes(width=1024, heads=16, blocks=2, micro_batch=1, num_microbatches=1),
            "width 256, 1x64 tokens, M=4": Sizes(
                width=256, heads=8, blocks=8, micro_batch=1, sequence_length=64, num_microbatches=4
            ),
        },
        {
            ONE_THREAD: Entry(1, 1, "one process", {}),
            "1 process, 2 threads": Entry(1, 2, "one process", {}),
            "pipeloom 1d": Entry(2, 1, "pipeloom", {}),
            "DTensor": Entry(2, 1, "dtensor", {}),
            "pipeloom 1d, sequence": Entry(2, 1, "pipeloom", _WITH_SEQUENCE),
            "DTensor, SequenceParallel": Entry(2, 1, "dtensor", _WITH_SEQUENCE),
        },
        [
            ("pipeloom 1d", "DTensor"),
            ("pipeloom 1d, sequence", "DTensor, SequenceParallel"),
            ("pipeloom 1d", "1 process, 2 threads"),
            ("pipeloom 1d, sequence", "1 process, 2 threads"),
            ("pipeloom 1d", ONE_THREAD),
        ],
    ),
    "pipeline": Part(
        {"width 256, 2x256 tokens, M=4": Sizes(width=256, heads=8, blocks=4, micro_batch=2, num_microbatches=4)},
        {
            "pipeloom": Entry(4, 1, "pipeloom", _PP),
            "torch": Entry(4, 1, "dtensor", _PP),
            "pipeloom, sequence": Entry(4, 1, "pipeloom", _PP | _WITH_SEQUENCE),
            "torch, SequenceParallel": Entry(4, 1, "dtensor", _PP | _WITH_SEQUENCE),
        },
        [("pipeloom", "torch"), ("pipeloom, sequence", "torch, SequenceParallel")],
    ),
    "grids": Part(
        {
            "width 256, 8x128 tokens": GridSizes(width=256),
            "width 512, 8x128 tokens": GridSizes(width=512, layers=2),
        },
        {
            "1d, 4 devices": Entry(4, 1, "layout", {"layout": "1d"}, "4 processes"),
            "1d with sequence, 4 devices": Entry(4, 1, "layout", {"layout": "1d", "sequence": True}, "4 processes"),
            "2d, 4 devices": Entry(4, 1, "layout", {"layout": "2d"}, "4 processes"),
            "1d, 8 devices": Entry(8, 1, "layout", {"layout": "1d"}, "8 processes"),
            "2.5d, 8 devices": Entry(8, 1, "layout", {"layout": "2.5d", "depth": 2}, "8 processes"),
            "3d, 8 devices": Entry(8, 1, "layout", {"layout": "3d"}, "8 processes"),
        },
        [
            ("1d with sequence, 4 devices", "1d, 4 devices"),
            ("2d, 4 devices", "1d, 4 devices"),
            ("2.5d, 8 devices", "1d, 8 devices"),
            ("3d, 8 devices", "1d, 8 devices"),
        ],
        emulates=True,
    ),
}
