"""The runs of arXiv:2401.10241, and their predictions."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.ir.recompute import Recompute
from tests.pure.published_runs import Run, configuration, gpt

_SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-auto"}
_MODELS = {  # table 3: layers, width, heads; ranks; samples per micro-batch
    "1.5B": ((22, 2304, 24), 8, 6),
    "6.2B": ((30, 4096, 32), 8, 3),
    "14.6B": ((46, 5120, 40), 16, 1),
    "28.3B": ((62, 6144, 48), 32, 1),
}


def zero_bubble() -> list[Run]:
    """Tables 4, 8 and 9."""
    return [*_main_results(), *_larger_microbatches(), *_few_microbatches()]


def _main_results() -> Iterator[Run]:
    for name, rows in (
        ("1.5B", {24: (11.8, 13.1, 12.9, 14.5), 64: (13.6, 13.9, 14.2, 14.9)}),
        ("6.2B", {24: (3.50, 4.01, 3.88, 4.32), 64: (4.03, 4.19, 4.20, 4.39)}),
        ("14.6B", {48: (1.40, 1.54, 1.61, 1.81)}),
        ("28.3B", {96: (0.76, 0.82, 0.87)}),
    ):
        for microbatches, throughputs in rows.items():
            for schedule, samples in zip(_SCHEDULES, throughputs, strict=False):
                yield _run("4", name, schedule, microbatches, samples)


def _larger_microbatches() -> Iterator[Run]:
    for name, microbatches, samples in (
        ("1.5B", 24, 12.0),
        ("6.2B", 24, 3.56),
        ("14.6B", 48, 1.53),
        ("28.3B", 96, 0.81),
    ):
        yield _run("8", name, "1F1B", microbatches, samples, larger=2)


def _few_microbatches() -> Iterator[Run]:
    for name, rows in (
        ("1.5B", {2: 3.56, 4: 5.74, 8: 8.26}),
        ("6.2B", {2: 1.04, 4: 1.69, 8: 2.45}),
        ("14.6B", {4: 0.39, 8: 0.65, 16: 0.95}),
    ):
        for microbatches, samples in rows.items():
            yield _run("9", name, "1F1B", microbatches, samples)


def _run(table: str, name: str, schedule: str, microbatches: int, samples: float, larger: int = 1) -> Run:
    """A run that trains so many samples per second and rank. First and last stage have one layer less."""
    sizes, ranks, size = _MODELS[name]
    size *= larger
    each = (sizes[0] + 2) // ranks
    chunks = each if schedule == "1F1B-I" else 1
    blocks = (each - 1, *[each] * (ranks - 2), each - 1)
    if chunks > 1:
        blocks = (0, *[1] * (ranks * each - 2), 0)
    of = configuration(ranks, 1, 1, size, size * microbatches, chunks, recompute=Recompute.NONE, blocks=blocks)
    no_bubble = schedule == "ZB-2p"
    return Run(
        table=f"arXiv:2401.10241, table {table}",
        name=f"{name} {schedule}, {microbatches} micro-batches of {size}",
        model=gpt(*sizes, sequence=1024, vocabulary=50304),
        cluster="dgx-a100-80",
        software="megatron-2022",
        of=of._replace(schedule=_SCHEDULES[schedule]),
        seconds=microbatches * size / ranks / samples,
        use="seen" if table == "4" and ranks == 8 else "held out",
        without_barrier=no_bubble,
        memory_limit=2.0 * ranks if no_bubble else None,
    )
