"""Bytes that torch allocates in a step, one allocation after another."""

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def peak_of(step: Callable[[], object]) -> int:
    """Most bytes that this thread has allocated at once in a step, beside those that are there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    found: list[tuple[int, int]] = []
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    for event in events:  # grows while it is walked along
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append((event.start_time_ns, fields.alloc_size))
        events += event.children
    return max(0, *accumulate(size for _, size in sorted(found)))
