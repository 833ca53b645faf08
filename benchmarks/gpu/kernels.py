"""The kernels of one training step on a CUDA device, by stream, as a picture.

    python -m benchmarks.gpu.kernels --schedule 1f1b --ranks 2 --transport threads --output kernels.svg

The profiler of torch (CUPTI) records when each kernel and each copy ran; neighbours of one kind become one box.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.subject import Machine, Sizes
from torch.profiler import ProfilerActivity, profile

import pipeloom as pl
from pipeloom.models import loss_fn

KINDS = {  # parts of names of kernels, and the colour of their boxes; the first that fits
    "matrix products": (("gemm", "nvjet", "cutlass", "cublas", "xmma"), "#4c78a8"),
    "attention": (("flash", "fmha", "attention"), "#f58518"),
    "copies": (("memcpy", "memset"), "#54a24b"),
    "other kernels": (("",), "#9d9da1"),
}
_GAP_SECONDS = 3e-6  # between kernels that are one box
_WIDTH, _ROW, _LEFT, _TOP = 960, 34, 90, 46  # pixels


class Box(NamedTuple):
    """Kernels of one kind that ran one after another on a stream; seconds from the beginning of the step."""

    stream: int
    kind: str
    start: float
    end: float


def kind_of(name: str) -> str:
    lower = name.lower()
    return next(kind for kind, (parts, _) in KINDS.items() if any(part in lower for part in parts))


def boxes(events: Iterable[Any]) -> list[Box]:
    """The boxes of the events of a profiler, by stream and time."""
    cuda = torch.autograd.DeviceType.CUDA
    found = [e for e in events if e.device_type() == cuda and e.duration_ns() > 0 and "ProfilerStep" not in e.name()]
    found.sort(key=lambda e: (e.device_resource_id(), e.start_ns()))
    origin = min((e.start_ns() for e in found), default=0)
    made: list[Box] = []
    for event in found:
        start = (event.start_ns() - origin) / 1e9
        new = Box(event.device_resource_id(), kind_of(event.name()), start, start + event.duration_ns() / 1e9)
        last = made[-1] if made else None
        if last is not None and last[:2] == new[:2] and new.start - last.end < _GAP_SECONDS:
            made[-1] = last._replace(end=max(last.end, new.end))
        else:
            made.append(new)
    return made


def svg(found: list[Box], title: str) -> str:
    """A row for each stream."""
    streams = sorted({box.stream for box in found})
    end = max(box.end for box in found)
    scale = (_WIDTH - _LEFT - 10) / end
    height = _TOP + _ROW * len(streams) + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title>',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    x = _LEFT
    for kind, (_, colour) in KINDS.items():
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="20">{escape(kind)}</text>')
        x += 40 + 7 * len(kind)
    for row, stream in enumerate(streams):
        top = _TOP + row * _ROW
        parts.append(f'<text x="6" y="{top + 17}">stream {stream}</text>')
        for box in found:
            if box.stream == stream:
                width = max(0.3, (box.end - box.start) * scale)
                parts.append(
                    f'<rect x="{_LEFT + box.start * scale:.2f}" y="{top}" width="{width:.2f}" height="{_ROW - 10}" '
                    f'fill="{KINDS[box.kind][1]}"/>'
                )
    bottom = _TOP + len(streams) * _ROW + 12
    parts.append(f'<text x="{_LEFT}" y="{bottom}">0</text>')
    parts.append(f'<text x="{_WIDTH - 10}" y="{bottom}" text-anchor="end">{end * 1e3:.1f} ms</text></svg>')
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels", description=__doc__)
    parser.add_argument("--schedule", default="1f1b", help="default 1f1b")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--transport", default="threads", help="threads (default), or loopback")
    parser.add_argument("--graphs", action="store_true", help="replay recorded actions; not with threads")
    parser.add_argument("--output", type=Path, default=Path("kernels.svg"), help="default kernels.svg")
    arguments = parser.parse_args()
    machine = Machine(torch.device("cuda:0"), False, 1, 0.0)
    sizes = Sizes(layers=4, width=1024, heads=16, length=1024, samples=2, microbatches=4, vocabulary=8192)
    model, batch = sizes.model(machine.device), sizes.batch(machine.device)
    schedule = pl.schedules.build(arguments.schedule, num_ranks=arguments.ranks, num_microbatches=sizes.microbatches)
    options: dict[str, Any] = {"transport": arguments.transport, "graphs": arguments.graphs}
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, **options) as pipe:
        for _ in range(4):
            model.zero_grad()
            pipe.step(*batch)
        machine.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
            model.zero_grad()
            pipe.step(*batch)
            machine.synchronize()
    results = profiler.profiler
    assert results is not None
    found = boxes(results.kineto_results.events())
    name = f"{arguments.schedule}, {arguments.ranks} ranks, {arguments.transport}{', graphs' * arguments.graphs}"
    arguments.output.write_text(svg(found, f"Kernels of one step: {name}; {torch.cuda.get_device_name()}"))
    busy = {stream: sum(b.end - b.start for b in found if b.stream == stream) for stream in {b.stream for b in found}}
    shown = ", ".join(f"stream {stream} {seconds * 1e3:.2f} ms" for stream, seconds in sorted(busy.items()))
    print(f"{name}: step {max(b.end for b in found) * 1e3:.2f} ms; busy: {shown}")


if __name__ == "__main__":
    main()
