"""Prove that a schedule or a program is legal: all rules in their order, and that no actions wait in a circle."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipeloom.errors import PipeloomError
from pipeloom.ir.action import Op
from pipeloom.ir.check.program_rules import PROGRAM_RULES
from pipeloom.ir.check.schedule_rules import SCHEDULE_RULES, UPDATE_RULES
from pipeloom.ir.schedule import Program, Schedule, schedule_of
from pipeloom.ir.versions import weight_versions
from pipeloom.ir.walk import proof_of, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is known of a legal pipeline before it runs.

    Attributes:
        live_activations: for each rank, the peak number of live (stage, micro-batch, slice) entries, from the start of
            their forward to the end of their B or W, without the time from an OFFLOAD to the RELOAD. The runtime holds
            exactly as many.
        peak_activations: the same in units of one rank's share of one micro-batch: a chunk counts 1/V, a slice 1/K.
        weight_versions: for each rank, the peak number of versions of its parameters.
    """

    live_activations: tuple[int, ...]
    peak_activations: tuple[float, ...]
    weight_versions: tuple[int, ...]


def check(pipeline: Schedule | Program) -> Checked:
    """Prove that `pipeline` is legal.

    The rules are `SCHEDULE_RULES` and, of a program, `PROGRAM_RULES`; and no actions may wait for each other in a
    circle. A large schedule is proved legal by its columns (`pipeloom.ir.large`), whose verdict is the same.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    schedule = schedule_of(pipeline)
    proof = proof_of(schedule)
    for rule in SCHEDULE_RULES if proof is None else UPDATE_RULES:
        rule.ask(schedule)
    if proof is not None and pipeline is schedule:
        live = proof.live
    else:
        for rule in PROGRAM_RULES if isinstance(pipeline, Program) else ():
            rule.ask(pipeline)
        deque(walk(pipeline), maxlen=0)  # raises if actions wait in a circle
        live = live_activations(pipeline)
    share = schedule.stage_share / schedule.num_slices
    stream = schedule.microbatches_per_update is not None
    return Checked(
        live_activations=live,
        peak_activations=tuple(count * share for count in live),
        weight_versions=weight_versions(schedule) if stream else (1,) * schedule.num_ranks,
    )


@contextmanager
def explained(pipeline: Schedule | Program) -> Iterator[None]:
    """A context in which an exception that an illegal `pipeline` causes becomes the ScheduleError of `check`."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception:
        check(pipeline)
        raise


def live_activations(pipeline: Schedule | Program) -> tuple[int, ...]:
    """For each rank, the peak number of live activations; depends on the orders alone, not on times."""
    schedule = schedule_of(pipeline)
    if schedule.forward_only:  # nothing is kept for a backward; only the activation being computed is live
        return tuple(int(any(a.op is Op.F for a in order)) for order in pipeline.orders)
    split = schedule.split_backwards
    peaks = []
    for order in pipeline.orders:
        live = peak = 0
        for stage, op, microbatch, piece in order:
            if op is Op.F or op is Op.RELOAD:
                live += 1
                peak = max(peak, live)
            elif op is Op.OFFLOAD or op is Op.W or (op is Op.B and (stage, microbatch, piece) not in split):
                live -= 1
        peaks.append(peak)
    return tuple(peaks)
