"""Prove a schedule or a program legal, or refuse it with the action, the rule and the fix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product, zip_longest

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import COMMUNICATION_OPS, COMPUTE_OPS, Action, Op
from pipeloom.ir.check_memory import check_data_axis, check_offload, check_reductions
from pipeloom.ir.schedule import Program, Schedule, WeightPolicy
from pipeloom.ir.versions import weight_versions
from pipeloom.ir.walk import dependency_order


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
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
    _check_sizes(pipeline, schedule)
    if isinstance(pipeline, Schedule) and pipeline.large and pipeline.proof is not None:
        return _checked(pipeline, pipeline.proof.live)
    _check_complete(pipeline, schedule)
    _check_overlapped(pipeline, schedule)
    if isinstance(pipeline, Program):
        _check_messages(pipeline)
        check_data_axis(pipeline)
        check_reductions(pipeline)
        check_offload(pipeline)
    for _ in dependency_order(pipeline):
        pass
    return _checked(schedule, live_activations(pipeline))


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
    schedule = pipeline.schedule if isinstance(pipeline, Program) else pipeline
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


def _check_sizes(pipeline: Schedule | Program, schedule: Schedule) -> None:
    if schedule.num_microbatches < 1 or schedule.num_slices < 1:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {schedule.num_microbatches} micro-batches and {schedule.num_slices} "
            "slices: both must be at least 1; raise them"
        )
    check_updates(schedule)
    if len(pipeline.orders) != schedule.num_ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has {len(pipeline.orders)} orders for {schedule.num_ranks} ranks: "
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


def _check_complete(pipeline: Schedule | Program, schedule: Schedule) -> None:
    """Every computation exactly once, and on a rank that holds its stage."""
    name, num_stages, num_microbatches = schedule.name, schedule.num_stages, schedule.num_microbatches
    rank_of, slices = schedule.placement.rank_of, _slices(schedule)
    for rank, action in pipeline.actions():
        stage, op, microbatch, piece = action
        if op not in COMPUTE_OPS and not pipeline.lowered:
            raise ScheduleError(
                f"schedule {name!r}: {action} on rank {rank}: a schedule holds F, B, I and W alone; "
                "drop it, pipeloom.passes.lower puts the others in"
            )
        if not 0 <= stage < num_stages:
            raise ScheduleError(f"schedule {name!r}: {action} on rank {rank}: stages are 0..{num_stages - 1}")
        if op in COMPUTE_OPS or op in COMMUNICATION_OPS:
            if microbatch is None or not 0 <= microbatch < num_microbatches:
                raise ScheduleError(
                    f"schedule {name!r}: {action} on rank {rank}: micro-batches are 0..{num_microbatches - 1}"
                )
            if rank_of(stage, microbatch) != rank:
                raise ScheduleError(
                    f"schedule {name!r}: {action} is on rank {rank}, but stage {stage} runs micro-batch {microbatch} "
                    f"on rank {rank_of(stage, microbatch)}; move it there"
                )
            if piece not in slices:
                raise ScheduleError(f"schedule {name!r}: {action} on rank {rank}: {schedule.num_slices} slices exist")
    counts = Counter(action for order in pipeline.orders for action in order if action.op in COMPUTE_OPS)
    twice = next((action for action, count in counts.items() if count > 1), None)
    if twice is not None:
        raise ScheduleError(f"schedule {name!r}: {twice} stands {counts[twice]} times; each action runs once: drop one")
    due = _due(schedule)
    missing = next((action for action in due if action not in counts), None)
    if missing is not None:
        raise ScheduleError(
            f"schedule {name!r}: {Action(*missing)} is missing: every stage runs every micro-batch; add it to rank "
            f"{rank_of(missing[0], missing[2])}"
        )
    if len(counts) > len(due):
        extra = min(counts.keys() - set(due))
        raise ScheduleError(
            f"schedule {name!r}: {extra} is one too many: a backward is either B or I and W, and a forward-only "
            "schedule has none; drop it"
        )


def _slices(schedule: Schedule) -> Sequence[int | None]:
    return (None,) if schedule.num_slices == 1 else range(schedule.num_slices)


def _due(schedule: Schedule) -> list[tuple[int, Op, int, int | None]]:
    """All computations of a schedule: the fields of their actions, which are equal to them and quicker to make."""
    split, due = schedule.split_backwards, []
    for stage, microbatch, piece in product(
        range(schedule.num_stages), range(schedule.num_microbatches), _slices(schedule)
    ):
        due.append((stage, Op.F, microbatch, piece))
        if not schedule.forward_only:
            ops = (Op.I, Op.W) if (stage, microbatch, piece) in split else (Op.B,)
            due += [(stage, op, microbatch, piece) for op in ops]
    return due


def _check_overlapped(pipeline: Schedule | Program, schedule: Schedule) -> None:
    """Every overlapped unit is an F with a backward directly behind it on its rank, each in one unit alone."""
    members = [action for pair in schedule.overlapped for action in pair]
    if len(set(members)) != len(members):
        twice = next(action for action, count in Counter(members).items() if count > 1)
        raise ScheduleError(f"schedule {schedule.name!r}: {twice} is in two overlapped pairs; take it out of one")
    behind = {first: second for order in pipeline.orders for first, second in pairwise(order)} if members else {}
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
            assert microbatch is not None
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
