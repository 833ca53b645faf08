"""Read and write the CSV of torch.distributed.pipelining: one row per rank, one cell per action.

    compute-only   0F0,0F1,(0F2;3B0)OVERLAP_F_B,0B0          torch adds communication itself
    lowered        0UNSHARD,0F0,0SEND_F0,3RECV_B0,...,0REDUCE_GRAD,0RESHARD

torch's runtime also reads each rank's stages from the file. It supports any placement with one rank per stage.
"""

import csv
import io
import re

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.check.checker import explained
from pipeloom.ir.check.input_types import of_type
from pipeloom.ir.data_axis import Granularity
from pipeloom.ir.schedule import Program, Schedule, WeightPolicy, schedule_of
from pipeloom.ir.text import parse_action, schedule_from_orders
from pipeloom.ir.walk import dependency_order

_UNIT = re.compile(r"\(([^)]*)\)OVERLAP_F_B")


def to_csv(pipeline: Schedule | Program) -> str:
    """CSV for torch's ``_PipelineScheduleRuntime._load_csv``: compute-only for a schedule, lowered for a program.

    torch reads the lowered form with ``format="compute_comms"``. Its receives are in the order of the sends, so both
    ranks of a pair list their messages in the same order. Gradients are reduced once per stage, as in torch.

    Raises:
        ScheduleError: torch does not support the schedule, or it deadlocks.
    """
    schedule = schedule_of(pipeline)
    with explained(schedule):
        _check_for_torch(pipeline)
        if isinstance(pipeline, Program):
            rows = _lowered(schedule)
        else:
            seconds = set(schedule.partners.values())
            rows = [[_cell(schedule, a) for a in order if a not in seconds] for order in schedule.orders]
    return "\n".join(map(",".join, rows)) + "\n"


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read a compute-only or lowered CSV, such as torch's ``_dump_csv`` writes.

    Only computations are read; the passes insert the rest again. `schedule_from_orders` finds placement and sizes.
    torch 2.13 writes its 1F1B with the forwards of the last stage counted from 1, unlike the schedule that it runs;
    here they count from 0.

    Raises:
        ScheduleError: invalid CSV, a cell is not an action, or stages are not numbered without gaps.
    """
    orders: list[tuple[Action, ...]] = []
    overlapped: set[tuple[Action, Action]] = set()
    try:
        rows = list(csv.reader(io.StringIO(of_type(text, str, "the text of a CSV").rstrip(), newline="")))
    except csv.Error as error:
        raise ScheduleError(
            f"not the CSV of a schedule ({error}). Use one row per rank and one cell per action, such as 0F0: stage 0, "
            "forward, micro-batch 0."
        ) from error
    for row in rows:
        order: list[Action] = []
        for cell in filter(None, map(str.strip, row)):
            unit = _UNIT.fullmatch(cell)
            if unit is None:
                order.append(parse_action(cell))
                continue
            members = tuple(map(parse_action, unit[1].split(";")))
            order += members
            if len(members) == 2 and members[0].op is Op.F:
                overlapped.add((members[0], members[1]))
        orders.append(_counted_from_zero([action for action in order if action.op in COMPUTE_OPS]))
    return schedule_from_orders(tuple(orders), name=name, overlapped=frozenset(overlapped))


def _counted_from_zero(order: list[Action]) -> tuple[Action, ...]:
    """A rank's order; forwards 1..M with backwards 0..M-1 become forwards 0..M-1."""
    if any(action.microbatch is None for action in order):
        return tuple(order)
    forwards = [action for action in order if action.op is Op.F]
    backwards = [action for action in order if action.op is not Op.F]
    ahead = [action._replace(microbatch=(action.microbatch or 0) + 1, op=Op.F) for action in backwards]
    if not forwards or len(forwards) != len(ahead) or set(forwards) != set(ahead):
        return tuple(order)
    return tuple(a._replace(microbatch=(a.microbatch or 0) - 1) if a.op is Op.F else a for a in order)


def _check_for_torch(pipeline: Schedule | Program) -> None:
    schedule = schedule_of(pipeline)
    for stage, ranks in enumerate(schedule.placement.replicas):
        if len(ranks) > 1:
            raise ScheduleError(
                f"schedule {schedule.name!r} holds stage {stage} on ranks {ranks}: torch.distributed.pipelining needs "
                "one rank per stage. Write JSON, or use a schedule without replicas, such as dualpipev."
            )
    for is_so, what, fix in (
        (schedule.num_slices > 1, "slices of micro-batches", "use 1 slice"),
        (schedule.weights is not WeightPolicy.FLUSH, "several versions of the weights", "use a synchronous schedule"),
        (schedule.forward_only, "no backwards", "use a training schedule"),
    ):
        if is_so:
            raise ScheduleError(
                f"schedule {schedule.name!r} has {what}: torch.distributed.pipelining does not support that. "
                f"Write JSON, or {fix}."
            )
    if not isinstance(pipeline, Program):
        return
    if pipeline.data is not None and pipeline.data.granularity is not Granularity.STEP:
        raise ScheduleError(
            f"program {pipeline.name!r} has granularity {pipeline.data.granularity.value!r}: torch.distributed."
            "pipelining gathers and reduces a stage once per step. Write JSON, or use granularity 'step'."
        )
    for _, action in pipeline.actions():
        if action.op is Op.OFFLOAD:
            raise ScheduleError(
                f"program {pipeline.name!r} has {action}: torch.distributed.pipelining does not offload activations. "
                "Write JSON, or remove OFFLOAD and RELOAD."
            )


def _cell(schedule: Schedule, action: Action) -> str:
    """One action, or the unit that it starts."""
    partner = schedule.partners.get(action)
    return str(action) if partner is None else f"({action};{partner})OVERLAP_F_B"


def _lowered(schedule: Schedule) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in schedule.orders]
    place, last = schedule.placement.rank_of, schedule.num_stages - 1
    to_come = dict.fromkeys(range(schedule.num_stages), schedule.num_microbatches)  # backwards of each stage
    begun: set[int] = set()
    seconds = set(schedule.partners.values())
    held: list[Action] = []  # the first of a unit, until the second comes
    for rank, _, action in dependency_order(schedule):
        row, stage = rows[rank], action.stage
        if action in schedule.partners:
            held.append(action)
            continue
        members = [held.pop(), action] if action in seconds else [action]
        new = [member.stage for member in members if member.stage not in begun]
        begun.update(new)
        row += [f"{stage}UNSHARD" for stage in new]
        row.append(_cell(schedule, members[0]))
        for stage, op, microbatch, _ in members:
            assert microbatch is not None
            step, send, receive = (1, "SEND_F", "RECV_F") if op is Op.F else (-1, "SEND_B", "RECV_B")
            neighbour = stage + step
            if op is not Op.W and 0 <= neighbour <= last and place(neighbour, microbatch) != rank:
                row.append(f"{stage}{send}{microbatch}")
                rows[place(neighbour, microbatch)].append(f"{neighbour}{receive}{microbatch}")
        for stage, op, _, _ in members:
            to_come[stage] -= op in (Op.B, Op.W)
            if op in (Op.B, Op.W) and not to_come[stage]:
                row += [f"{stage}REDUCE_GRAD", f"{stage}RESHARD"]
    return rows
