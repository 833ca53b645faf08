"""Prove a schedule or a program legal, or refuse it with the action, the rule and the fix."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from pipeloom.errors import PipeloomError, ScheduleError
from pipeloom.ir.action import COMMUNICATION_OPS, COMPUTE_OPS, Action, Op
from pipeloom.ir.check.completeness import check_complete, refuse_place
from pipeloom.ir.check.input_types import check_actions
from pipeloom.ir.check.memory import check_data_axis, check_offload, check_reductions
from pipeloom.ir.large.proof import proof_of
from pipeloom.ir.schedule import Orders, Program, Schedule, WeightPolicy, schedule_of
from pipeloom.ir.versions import weight_versions
from pipeloom.ir.walk import walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What is known of a legal pipeline before it runs.

    Attributes:
        live_activations: for each rank, the largest number of (stage, micro-batch, slice) entries held at once, from
            the start of their forward to the end of their B or W, without the time from an OFFLOAD to the RELOAD. The
            runtime holds exactly as many.
        peak_activations: the same in units of one rank-share of one micro-batch: a chunk counts 1/V, a slice 1/K.
        weight_versions: for each rank, how many versions of its parameters exist at once.
    """

    live_activations: tuple[int, ...]
    peak_activations: tuple[float, ...]
    weight_versions: tuple[int, ...]


def check(pipeline: Schedule | Program) -> Checked:
    """Prove that `pipeline` is legal.

    Rules: every computation stands exactly once, on the rank that holds its stage; no actions wait for each other in
    a circle; overlapped pairs are neighbours; in a program, sends and receives match, and messages between two ranks
    have one order on both sides; parameters of a data axis are there when they are used, all gradients are reduced
    once, and activations that were moved away come back.

    Raises:
        ScheduleError: one line with the action, the rule and the fix.
    """
    schedule = schedule_of(pipeline)
    _check_sizes(schedule)
    proven = proof_of(schedule)
    if proven is None:
        check_actions(schedule.orders, f"schedule {schedule.name!r}")
        check_complete(schedule)
        _check_overlapped(schedule, schedule.orders)
    elif pipeline is schedule:
        return _checked(schedule, proven.live)
    if isinstance(pipeline, Program):
        _check_program(pipeline)
    deque(walk(pipeline), maxlen=0)  # all of it, for its errors
    return _checked(schedule, live_activations(pipeline))


def _check_program(program: Program) -> None:
    """What the passes put between the computations of a legal schedule."""
    _check_ranks(program.orders, program.schedule, "program")
    check_actions(program.orders, f"program {program.name!r}")
    _check_computations(program)
    _check_overlapped(program.schedule, program.orders)
    _check_messages(program)
    check_data_axis(program)
    check_reductions(program)
    check_offload(program)


@contextmanager
def explained(pipeline: Schedule | Program) -> Iterator[None]:
    """What fails inside because `pipeline` is not legal fails with the line that `check` has for it."""
    try:
        yield
    except PipeloomError:
        raise
    except Exception:
        check(pipeline)
        raise


def _checked(schedule: Schedule, live: tuple[int, ...]) -> Checked:
    share = schedule.stage_share / schedule.num_slices
    stream = schedule.microbatches_per_update is not None
    return Checked(
        live_activations=live,
        peak_activations=tuple(count * share for count in live),
        weight_versions=weight_versions(schedule) if stream else (1,) * schedule.num_ranks,
    )


def live_activations(pipeline: Schedule | Program) -> tuple[int, ...]:
    """For each rank, the peak number of activations alive; depends on the orders alone, not on times."""
    schedule = schedule_of(pipeline)
    if schedule.forward_only:  # nothing is kept for a backward; the one being computed is alive
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


def _check_sizes(schedule: Schedule) -> None:
    if schedule.num_microbatches < 1 or schedule.num_slices < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_microbatches} micro-batches and {schedule.num_slices} "
            "slices: both must be at least 1; raise them"
        )
    check_updates(schedule)
    _check_ranks(schedule.orders, schedule, "schedule")


def _check_ranks(orders: Orders, schedule: Schedule, what: str) -> None:
    if len(orders) != schedule.num_ranks:
        raise ScheduleError(
            f"{what} {schedule.name!r} has {len(orders)} orders for {schedule.num_ranks} ranks: "
            "each rank of the placement needs one; add or drop orders"
        )


def check_updates(schedule: Schedule) -> None:
    """A stream of micro-batches is a whole number of updates on every stage.

    Raises:
        ScheduleError: it is not, or it is no stream and says that it updates, or has slices, or no backwards.
    """
    count = schedule.microbatches_per_update
    if (count is None) is not (schedule.weights is WeightPolicy.FLUSH) or (count is not None and count < 1):
        raise ScheduleError(
            f"schedule {schedule.name!r} has weight policy {schedule.weights.value!r} and {count} micro-batches an "
            "update: 'flush' has None, every other policy at least 1; correct one of them"
        )
    if count is None:
        return
    if schedule.forward_only:
        raise ScheduleError(
            f"schedule {schedule.name!r} has no backwards and weight policy {schedule.weights.value!r}: evaluation "
            "updates nothing and has 'flush'; make it with pipeloom.passes.forward_only"
        )
    if schedule.num_slices > 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_slices} slices under weight policy "
            f"{schedule.weights.value!r}: slices run under 'flush' alone; take one slice"
        )
    for stage in range(schedule.num_stages):
        interval = schedule.update_interval(stage)
        if schedule.num_microbatches % interval:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {schedule.num_microbatches} micro-batches, and stage {stage} with "
                f"{len(schedule.placement.replicas[stage])} replicas updates after every {interval}: a stream is "
                f"a whole number of updates; take a multiple of {interval}"
            )


def _check_computations(program: Program) -> None:
    """A program runs the computations of its schedule, in their order; its messages and sums are of stages it has."""
    last = program.schedule.num_stages - 1
    for rank, (order, planned) in enumerate(zip(program.orders, program.schedule.orders, strict=True)):
        found = [action for action in order if action.op in COMPUTE_OPS]
        if found != list(planned):
            got, want = next(pair for pair in zip_longest(found, planned) if pair[0] != pair[1])
            raise ScheduleError(
                f"program {program.name!r}: rank {rank} runs {got or 'nothing'} where its schedule has "
                f"{want or 'nothing'}: a program is its schedule with other actions in between; lower the schedule "
                "that is meant with pipeloom.passes.lower"
            )
        odd = next((action for action in order if not 0 <= action.stage <= last), None)
        if odd is not None:
            raise ScheduleError(
                f"program {program.name!r}: {odd} on rank {rank}: stages are 0..{last}; correct its stage"
            )


def _check_overlapped(schedule: Schedule, orders: Orders) -> None:
    """Every overlapped unit is an F with a backward directly behind it on its rank, each in one unit alone."""
    members = [action for pair in schedule.overlapped for action in pair]
    if len(set(members)) != len(members):
        twice = next(action for action, count in Counter(members).items() if count > 1)
        raise ScheduleError(f"schedule {schedule.name!r}: {twice} is in two overlapped pairs; take it out of one")
    behind = {first: second for order in orders for first, second in pairwise(order)} if members else {}
    for first, second in schedule.overlapped:
        if first.op is not Op.F or second.op not in (Op.B, Op.I) or behind.get(first) != second:
            raise ScheduleError(
                f"schedule {schedule.name!r}: {first} and {second} are no overlapped pair: it is an F with a B or I "
                "directly behind it on the same rank; reorder them or drop the pair"
            )


def _check_messages(program: Program) -> None:
    """Sends and receives match one to one, and every directed pair of ranks sees them in one order."""
    sent: dict[tuple[int, int], list[Action]] = {}
    received: dict[tuple[int, int], list[tuple[int, Op, int | None, int | None]]] = {}  # their sends
    seen: set[Action] = set()
    last, rank_of = program.schedule.num_stages - 1, program.placement.rank_of
    for rank, order in enumerate(program.orders):
        for action in order:
            stage, op, microbatch, piece = action
            if op not in COMMUNICATION_OPS:
                continue
            if microbatch is None or rank_of(stage, microbatch) != rank:
                refuse_place(program.schedule, action, rank, COMMUNICATION_OPS)
            other = stage + (1 if op is Op.SEND_F or op is Op.RECV_B else -1)
            if not 0 <= other <= last or (peer := rank_of(other, microbatch)) == rank:
                raise ScheduleError(
                    f"program {program.name!r}: {action} on rank {rank} has no other rank at its other end: messages "
                    "go between neighbouring stages on different ranks; drop it"
                )
            if action in seen:
                raise ScheduleError(
                    f"program {program.name!r}: {action} stands twice; each message goes once: drop one"
                )
            seen.add(action)
            if op is Op.SEND_F or op is Op.SEND_B:
                sent.setdefault((rank, peer), []).append(action)
            else:
                send = Op.SEND_F if op is Op.RECV_F else Op.SEND_B
                received.setdefault((peer, rank), []).append((other, send, microbatch, piece))
    for pair in sorted(sent.keys() | received.keys()):
        for index, (sender, awaited) in enumerate(zip_longest(sent.get(pair, ()), received.get(pair, ()))):
            if sender != awaited:
                receiver = None if awaited is None else Action(*awaited)
                raise ScheduleError(
                    f"program {program.name!r}: message {index} from rank {pair[0]} to rank {pair[1]} is sent by "
                    f"{sender} but received as {receiver}: both sides must list the same messages in one order; "
                    "reorder or add the missing end"
                )
