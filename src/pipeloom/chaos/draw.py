"""`draw_faults`: faults at random places of a run, from what a reference run has recorded. No torch."""

import random
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from pipeloom.chaos.fault import KINDS, Fault
from pipeloom.chaos.record import STEPS, Record
from pipeloom.errors import InputError

_HANG_STEPS = 2  # completed before a hang, unless it may last long: the watchdog is patient in a process's first steps
_SLOW_STEPS = 12  # completed before a rank becomes slow, so that it has a history
_SLOWER_STEPS = 20  # then still to come, so that it can be noticed
_FLIP_SAVES = 2  # begun before a flip, so that an earlier checkpoint is good
_LONGEST_DELAY_SECONDS = 0.003
_TIMES_SLOWER = (1.5, 2.0, 3.0, 5.0, 10.0)
_MOST_COPY_STEPS = 4


def draw_faults(
    count: int,
    seed: int,
    kinds: Sequence[str],
    record: Record,
    sizes: Mapping[str, int],
    *,
    torchrun: bool,
    long_hangs: bool = False,
) -> list[Fault]:
    """`count` faults, the same for the same seed and run; all kinds equally often.

    Args:
        kinds: keys of `KINDS`.
        record: of the reference run.
        sizes: bytes of each file of a checkpoint of this run.
        torchrun: whether torchrun starts the ranks.
        long_hangs: whether hangs strike in the first steps and in evaluations too, where the watchdog is patient.

    Raises:
        InputError: the run has no place for a kind, such as too few steps.
    """
    draw = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += draw.sample(list(kinds), len(kinds))
    return [_fault(draw, kind, record, sizes, torchrun=torchrun, long_hangs=long_hangs) for kind in order[:count]]


def _fault(
    draw: random.Random, kind: str, record: Record, sizes: Mapping[str, int], *, torchrun: bool, long_hangs: bool
) -> Fault:
    places = {rank: _places(kind, record, rank, sizes, long_hangs=long_hangs) for rank in record.ranks}
    ranks = [rank for rank, found in places.items() if found]
    if not ranks:
        raise InputError(
            f"--kinds {kind}: the run has no place for it ({KINDS[kind].text}). Give it more steps, or more "
            "checkpoints (save_steps)."
        )
    rank = draw.choice(ranks)
    at = draw.choice(places[rank])
    more: dict[str, Any] = {}
    match kind:
        case "save-kill":
            more["delay_seconds"] = draw.choice((0.0, draw.uniform(0.0, _LONGEST_DELAY_SECONDS)))
        case "preempt":
            parent = draw.random() < 0.5
            signals = (signal.SIGTERM,) if torchrun and parent else (signal.SIGTERM, signal.SIGUSR1)
            more |= {"parent": parent, "signal": int(draw.choice(signals))}
        case "full-disk":
            size = sizes[_written(record.files(rank)[at])]
            more["limit_bytes"] = draw.randrange(1, size)
        case "recover-kill" | "recover-all-kill":
            more["copy_steps"] = draw.randrange(_MOST_COPY_STEPS + 1)
        case "elastic-kill":
            more["copy_steps"] = draw.randrange(1, _MOST_COPY_STEPS + 1)
        case "slow":
            more["times"] = draw.choice(_TIMES_SLOWER)
        case "flip" | "late-flip":
            more["position"] = draw.random()
    return Fault(kind=kind, rank=rank, at=at, **more)


def _places(kind: str, record: Record, rank: int, sizes: Mapping[str, int], *, long_hangs: bool) -> list[int]:
    """The numbers of the actions or file operations of a rank where a kind of fault may strike."""
    if KINDS[kind].trigger == "file":
        files = record.files(rank)
        return [at for at, text in files.items() if kind == "save-kill" or sizes.get(_written(text), 0) > 1]
    match kind:
        case "stop" | "loop" | "lock" if long_hangs:
            found = record.actions(rank, phases=(STEPS, "evaluation"))
        case "stop" | "loop" | "lock":
            found = record.actions(rank, phases=(STEPS,), least_steps=_HANG_STEPS)
        case "slow":
            latest = record.num_steps - _SLOWER_STEPS
            found = record.actions(rank, phases=(STEPS,), least_steps=_SLOW_STEPS, most_steps=latest)
            found = found or record.actions(rank, phases=(STEPS,))
        case "flip" | "late-flip":
            found = record.actions(rank, after_saves=_FLIP_SAVES)
        case _:
            found = record.actions(rank)
    return [at for phase in found for at in phase]


def _written(operation: str) -> str:
    """The file that an operation writes; empty if it is another operation."""
    name, _, file = operation.partition(" ")
    return file if name == "open" else ""
