"""What is legal in a schedule: one function per rule, asked in the order of this file.

Every rule relies on those before it: a rule about micro-batches need not ask whether the stage exists. That no actions
wait for each other in a circle is asked last, by `pipeloom.ir.walk`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pipeloom.errors import ScheduleError
from pipeloom.ir.action import COMPUTE_OPS, Action, Op
from pipeloom.ir.check.input_types import ACTIONS_ONLY, foreign_entries
from pipeloom.ir.schedule import Program, Schedule, WeightPolicy, schedule_of

Breaches = Iterator[tuple[str, str]]  # what breaks the rule, and the fix


@dataclass(frozen=True)
class Rule:
    """What must hold of schedules, of programs, or of both.

    Attributes:
        sentence: what must hold; errors quote it.
        breaches: yields what breaks it; may rely on all rules before its own.
    """

    sentence: str
    breaches: Callable[[Any], Breaches]

    @property
    def name(self) -> str:
        return self.breaches.__name__

    def ask(self, pipeline: Schedule | Program) -> None:
        """Raises ScheduleError, with the first breach, the rule and the fix on one line, if there is a breach."""
        for what, fix in self.breaches(pipeline):
            kind = "program" if pipeline.lowered else "schedule"
            raise ScheduleError(f"{kind} {pipeline.name!r}: {what}: {self.sentence}. {fix}.")


def rule(sentence: str, rules: list[Rule]) -> Callable[[Callable[[Any], Breaches]], Rule]:
    """Make a `Rule` of the function that finds its breaches, the last of `rules`."""

    def made(breaches: Callable[[Any], Breaches]) -> Rule:
        rules.append(Rule(sentence, breaches))
        return rules[-1]

    return made


def repeated(actions: Iterable[tuple[int, Action]]) -> Breaches:
    """The actions, each with its rank, that have come before."""
    seen: set[Action] = set()
    for rank, action in actions:
        if action in seen:
            yield f"{action} appears twice on rank {rank}", "Remove one"
        seen.add(action)


def at(action: Action, rank: int) -> str:
    return f"{action} on rank {rank}"


SCHEDULE_RULES: list[Rule] = []


@rule("both must be at least 1", SCHEDULE_RULES)
def sizes(schedule: Schedule) -> Breaches:
    if min(schedule.num_microbatches, schedule.num_slices) < 1:
        yield f"{schedule.num_microbatches} micro-batches and {schedule.num_slices} slices", "Use 1 or more"


@rule("'flush' has no micro-batches per update, every other weight policy has at least 1", SCHEDULE_RULES)
def update_interval(schedule: Schedule) -> Breaches:
    count, flushes = schedule.microbatches_per_update, schedule.weights is WeightPolicy.FLUSH
    if (count is None) is not flushes or (count is not None and count < 1):
        seen = f"weight policy {schedule.weights.value!r} with {count} micro-batches per update"
        yield seen, "Change weights or microbatches_per_update"


@rule("evaluation updates nothing, so its weight policy is 'flush'", SCHEDULE_RULES)
def evaluation_without_updates(schedule: Schedule) -> Breaches:
    if schedule.forward_only and schedule.microbatches_per_update is not None:
        seen = f"no backwards under weight policy {schedule.weights.value!r}"
        yield seen, "Make the schedule with pipeloom.passes.forward_only"


@rule("sequences are sliced under weight policy 'flush' only", SCHEDULE_RULES)
def streams_of_whole_sequences(schedule: Schedule) -> Breaches:
    if schedule.num_slices > 1 and schedule.microbatches_per_update is not None:
        yield f"{schedule.num_slices} slices under weight policy {schedule.weights.value!r}", "Use 1 slice"


@rule("a stream must end with an update of every stage", SCHEDULE_RULES)
def whole_updates(schedule: Schedule) -> Breaches:
    for stage in range(schedule.num_stages) if schedule.microbatches_per_update is not None else ():
        interval = schedule.update_interval(stage)
        if schedule.num_microbatches % interval:
            seen = f"{schedule.num_microbatches} micro-batches, but stage {stage} with "
            seen += f"{len(schedule.placement.replicas[stage])} replicas updates after every {interval}"
            yield seen, f"Use a multiple of {interval}"


UPDATE_RULES = SCHEDULE_RULES[-4:]  # they need no look at the orders


@rule("each rank of the placement has one order", SCHEDULE_RULES)
def one_order_per_rank(pipeline: Schedule | Program) -> Breaches:
    if len(pipeline.orders) != pipeline.num_ranks:
        yield f"{len(pipeline.orders)} orders for {pipeline.num_ranks} ranks", "Add or remove orders"


@rule(ACTIONS_ONLY, SCHEDULE_RULES)
def actions_only(pipeline: Schedule | Program) -> Breaches:
    yield from foreign_entries(pipeline.orders)


@rule("a schedule holds F, B, I and W only", SCHEDULE_RULES)
def computations_only(schedule: Schedule) -> Breaches:
    for rank, action in schedule.actions():
        if action.op not in COMPUTE_OPS:
            yield at(action, rank), "Remove it; pipeloom.passes.lower inserts all other ops"


@rule("the stage does not exist", SCHEDULE_RULES)
def known_stages(pipeline: Schedule | Program) -> Breaches:
    stages = range(pipeline.placement.num_stages)
    for rank, action in pipeline.actions():
        if action.stage not in stages:
            yield at(action, rank), f"Use one of the stages 0..{stages[-1]}, or another placement"


@rule("the micro-batch does not exist", SCHEDULE_RULES)
def known_microbatches(schedule: Schedule) -> Breaches:
    microbatches = range(schedule.num_microbatches)
    for rank, action in schedule.actions():
        if action.microbatch is None or action.microbatch not in microbatches:
            yield at(action, rank), f"Use one of the micro-batches 0..{microbatches[-1]}, or raise num_microbatches"


@rule("an action runs on the rank that holds its stage for its micro-batch", SCHEDULE_RULES)
def own_rank(schedule: Schedule) -> Breaches:
    replicas = schedule.placement.replicas
    for rank, action in schedule.actions():
        ranks, microbatch = replicas[action.stage], action.microbatch or 0
        if ranks[microbatch % len(ranks)] != rank:
            yield at(action, rank), f"Move it to rank {ranks[microbatch % len(ranks)]}"


@rule("slices are numbered where micro-batches are sliced, and only there", SCHEDULE_RULES)
def known_slices(schedule: Schedule) -> Breaches:
    count = schedule.num_slices
    for rank, action in schedule.actions():
        if (action.slice is None) is not (count == 1) or not 0 <= (action.slice or 0) < count:
            fix = "Remove its slice, or raise num_slices" if count == 1 else f"Use one of the slices 0..{count - 1}"
            yield at(action, rank), fix


@rule("each action runs exactly once", SCHEDULE_RULES)
def once(schedule: Schedule) -> Breaches:
    yield from repeated(schedule.actions())


@rule("a backward is either B, or I and W; a forward-only schedule has none", SCHEDULE_RULES)
def one_backward(schedule: Schedule) -> Breaches:
    split, forward_only = schedule.split_backwards, schedule.forward_only
    for rank, action in schedule.actions():
        stage, op, microbatch, piece = action
        if op is Op.F or (op is Op.I and not forward_only):
            continue
        if forward_only or ((stage, microbatch, piece) in split) is (op is Op.B):
            yield at(action, rank), "Remove it"


@rule("every stage runs every micro-batch", SCHEDULE_RULES)
def complete(schedule: Schedule) -> Breaches:
    # All that stands is due and stands once, so nothing is missing if there is enough of it.
    cells = schedule.num_stages * schedule.num_microbatches * schedule.num_slices
    due = cells if schedule.forward_only else 2 * cells + len(schedule.split_backwards)
    if sum(map(len, schedule.orders)) == due:
        return
    seen = {action for _, action in schedule.actions()}
    for action in _due(schedule):
        if action not in seen:
            rank = schedule.placement.rank_of(action.stage, action.microbatch or 0)
            yield f"{action} is missing", f"Add it to rank {rank}"


def _due(schedule: Schedule) -> Iterator[Action]:
    """All computations, one by one: an incomplete schedule may lack more of them than fit into memory."""
    slices = (None,) if schedule.num_slices == 1 else range(schedule.num_slices)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            for piece in slices:
                yield Action(stage, Op.F, microbatch, piece)
                if not schedule.forward_only:
                    split = (stage, microbatch, piece) in schedule.split_backwards
                    yield from (Action(stage, op, microbatch, piece) for op in ((Op.I, Op.W) if split else (Op.B,)))


@rule(
    "an overlapped pair is an F with a B or I directly behind it on the same rank, each in one pair only",
    SCHEDULE_RULES,
)
def overlapped_pairs(pipeline: Schedule | Program) -> Breaches:
    pairs = schedule_of(pipeline).overlapped
    for action, count in Counter(action for pair in pairs for action in pair).items():
        if count > 1:
            yield f"{action} is in two overlapped pairs", "Remove it from one"
    behind = {first: second for order in pipeline.orders for first, second in pairwise(order)} if pairs else {}
    for first, second in pairs:
        if first.op is not Op.F or second.op not in (Op.B, Op.I) or behind.get(first) != second:
            yield f"{first} and {second}", "Reorder them, or remove the pair"
