"""What is legal in the program of a legal schedule: one function per rule, asked in the order of this file.

    messages       every SEND has its RECV, and two ranks list their messages in the same order
    skips          values that skip stages, and their gradients, go between the stages that the program names
    parameters     UNSHARD and RESHARD of a stage alternate; where replicas hold shards, F, B and I stand between them
    gradients      every B and W is covered by a later REDUCE_GRAD, which has the micro-batch of the last it covers
    shared         REDUCE_GRAD without a micro-batch, once, behind all others: parameters that several ranks hold
    updates        those of a stream stand where `pipeloom.ir.versions` puts them
    activations    F ... OFFLOAD ... RELOAD ... B or I, each once

Every rule relies on those before it. Rules of parameters, gradients and activations concern one rank's order each.
"""

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from pipeloom.ir.action import COMMUNICATION_OPS, COMPUTE_OPS, SENDS, SKIP_OPS, Action, Op
from pipeloom.ir.check.schedule_rules import (
    Breaches,
    Rule,
    actions_only,
    at,
    known_stages,
    one_order_per_rank,
    overlapped_pairs,
    repeated,
    rule,
)
from pipeloom.ir.schedule import Program, peer_of
from pipeloom.ir.versions import with_updates

_READS = frozenset({Op.F, Op.B, Op.I})
_GATHERS = frozenset({Op.UNSHARD, Op.RESHARD})
_MOVES = frozenset({Op.OFFLOAD, Op.RELOAD})
_AROUND_UPDATES = frozenset({Op.F, Op.B, Op.W, Op.REDUCE_GRAD, Op.STEP})


PROGRAM_RULES: list[Rule] = [one_order_per_rank, actions_only]


@rule("a program runs its schedule's computations in their order, with other actions in between", PROGRAM_RULES)
def same_computations(program: Program) -> Breaches:
    for rank, (order, planned) in enumerate(zip(program.orders, program.schedule.orders, strict=True)):
        for got, want in zip_longest((action for action in order if action.op in COMPUTE_OPS), planned):
            if got != want:
                seen = f"rank {rank} runs {got or 'nothing'} where its schedule has {want or 'nothing'}"
                yield seen, "Lower the schedule that is meant with pipeloom.passes.lower"


PROGRAM_RULES += (known_stages, overlapped_pairs)


# --- messages --------------------------------------------------------------------------------------------------------


def _messages(program: Program) -> Iterator[tuple[int, Action]]:
    return ((rank, action) for rank, action in program.actions() if action.op in COMMUNICATION_OPS)


@rule(
    "messages go between neighbouring stages, or along a skip, on different ranks, from the rank that runs the "
    "micro-batch",
    PROGRAM_RULES,
)
def messages_between_ranks(program: Program) -> Breaches:
    last, place = program.schedule.num_stages - 1, program.placement
    skips = {skip[:2]: skip.has_gradient for skip in program.skips}
    for rank, action in _messages(program):
        stage, _, microbatch, _ = action
        if microbatch is None or not 0 <= microbatch < program.num_microbatches:
            yield at(action, rank), f"Use one of the micro-batches 0..{program.num_microbatches - 1}"
        elif place.rank_of(stage, microbatch) != rank:
            yield at(action, rank), f"Move it to rank {place.rank_of(stage, microbatch)}"
        elif action.op in SKIP_OPS and action.slice is None:
            yield at(action, rank), "Name the stage at the other end"
        elif action.op in SKIP_OPS and not _along_a_skip(action, skips):
            yield at(action, rank), "Remove it, or add the two stages to the program's skips"
        elif not 0 <= action.other_stage <= last or peer_of(action, place) == rank:
            yield f"{at(action, rank)} has no other rank at its other end", "Remove it"


def _along_a_skip(action: Action, skips: Mapping[tuple[int, int], bool]) -> bool:
    """Whether a message belongs to one of the skips, each with whether it has a gradient."""
    forward = action.op in (Op.SEND_SKIP, Op.RECV_SKIP)
    leaves = action.op in (Op.SEND_SKIP, Op.RECV_SKIP_GRAD)  # its stage is the source of the skip
    pair = (action.stage, action.other_stage) if leaves else (action.other_stage, action.stage)
    return pair in skips and (forward or skips[pair])


@rule("each message is sent and received once", PROGRAM_RULES)
def messages_once(program: Program) -> Breaches:
    yield from repeated(_messages(program))


@rule("both sides must list the same messages in one order", PROGRAM_RULES)
def messages_in_order(program: Program) -> Breaches:
    sent: dict[tuple[int, int, bool], list[Action]] = {}  # of two ranks, ordinary messages and skips
    received: dict[tuple[int, int, bool], list[Action]] = {}  # their sends
    for rank, action in _messages(program):
        peer = peer_of(action, program.placement)
        skips = action.op in SKIP_OPS
        if action.op in SENDS:
            sent.setdefault((rank, peer, skips), []).append(action)
        else:
            received.setdefault((peer, rank, skips), []).append(action.other_end())
    for pair in sorted(sent.keys() | received.keys()):
        for index, (sender, awaited) in enumerate(zip_longest(sent.get(pair, ()), received.get(pair, ()))):
            if sender != awaited:
                seen = f"message {index} from rank {pair[0]} to rank {pair[1]} is sent by {sender} but received as"
                yield f"{seen} {awaited}", "Reorder the messages, or add the missing end"


# --- parameters ------------------------------------------------------------------------------------------------------


@rule("parameters and gradients of a stage belong to the ranks that hold it", PROGRAM_RULES)
def stage_actions_on_holders(program: Program) -> Breaches:
    for rank, action in program.actions():
        if action.op in _GATHERS or action.op is Op.REDUCE_GRAD:
            held = program.placement.stages_of[rank]
            if action.stage not in held:
                yield at(action, rank), f"Move it to a rank that holds the stage; this one holds {held}"


@rule("parameters are gathered for all micro-batches, where the data-parallel strategy shards them", PROGRAM_RULES)
def gathers_of_the_strategy(program: Program) -> Breaches:
    data = program.data
    for rank, action in program.actions():
        if action.op not in _GATHERS:
            continue
        if data is None:
            yield f"{at(action, rank)} without a data axis", "Remove it, or add a data axis"
        elif not (data.unshards if action.op is Op.UNSHARD else data.strategy.shards_parameters):
            yield f"{at(action, rank)} with {data.strategy.value}, which keeps full parameters", "Remove it"
        elif action.microbatch is not None:
            yield at(action, rank), "Remove its micro-batch"


def _with_gathered(program: Program) -> Iterator[tuple[int, Action, bool]]:
    """Every action with its rank, and whether its stage's parameters are there before it."""
    for rank, order in enumerate(program.orders):
        there: set[int] = set()
        for action in order:
            yield rank, action, action.stage in there
            if action.op is Op.UNSHARD:
                there.add(action.stage)
            elif action.op is Op.RESHARD:
                there.discard(action.stage)


@rule("a computation needs the full parameters of its stage", PROGRAM_RULES)
def gathered_when_read(program: Program) -> Breaches:
    if program.data is not None and program.data.unshards:
        for rank, action, there in _with_gathered(program):
            if action.op in _READS and not there:
                yield f"{at(action, rank)} without parameters", f"Add {action.stage}UNSHARD before it"


@rule("UNSHARD and RESHARD of a stage alternate", PROGRAM_RULES)
def gathers_alternate(program: Program) -> Breaches:
    for rank, action, there in _with_gathered(program) if program.data is not None else ():
        if action.op is Op.UNSHARD and there:
            yield f"{at(action, rank)}, where the parameters are there already", "Remove it, or add a RESHARD before it"
        if action.op is Op.RESHARD and not there:
            yield f"{at(action, rank)}, where the parameters are not there", "Remove it, or add an UNSHARD before it"


@rule("a step of zero3 ends with sharded parameters", PROGRAM_RULES)
def sharded_at_the_end(program: Program) -> Breaches:
    if program.data is not None and program.data.strategy.shards_parameters:
        for rank, order in enumerate(program.orders):
            last = {action.stage: action.op for action in order if action.op in _GATHERS}
            for stage in sorted(stage for stage, op in last.items() if op is Op.UNSHARD):
                yield f"{Action(stage, Op.RESHARD)} is missing", f"Add it to rank {rank}"


# --- gradients -------------------------------------------------------------------------------------------------------


def _with_uncovered(program: Program, rank: int) -> Iterator[tuple[Action, Action | None]]:
    """Every action of a rank with the last backward of its stage that no REDUCE_GRAD before it covers.

    At the end, such backwards come once more, each with itself.
    """
    last: dict[int, Action] = {}
    for action in program.orders[rank]:
        yield action, last.get(action.stage)
        if action.op in (Op.B, Op.W):
            last[action.stage] = action
        elif action.op is Op.REDUCE_GRAD and action.microbatch is not None:
            last.pop(action.stage, None)
    yield from ((action, action) for action in sorted(last.values()))


def _has_data_gradients(program: Program) -> bool:
    return program.data is not None and program.schedule.microbatches_per_update is None


@rule("a REDUCE_GRAD has the micro-batch of the last backward that it covers", PROGRAM_RULES)
def reductions_cover_backwards(program: Program) -> Breaches:
    for rank in range(program.num_ranks) if _has_data_gradients(program) else ():
        for action, covered in _with_uncovered(program, rank):
            if action.op is not Op.REDUCE_GRAD or action.microbatch is None:
                continue
            if covered is None:
                yield f"{at(action, rank)}, with no backward since the last reduction", "Remove it"
            elif covered.with_op(Op.REDUCE_GRAD) != action:
                yield f"{at(action, rank)}, where the last backward is {covered}", "Use that micro-batch"


@rule("gradients that are not sharded are reduced once, or they would be summed twice", PROGRAM_RULES)
def full_gradients_reduced_once(program: Program) -> Breaches:
    if _has_data_gradients(program) and program.data is not None and not program.data.strategy.shards_gradients:
        for rank, order in enumerate(program.orders):
            reduced: set[int] = set()
            for action in order:
                if action.op is Op.REDUCE_GRAD and action.microbatch is not None:
                    if action.stage in reduced:
                        yield at(action, rank), "Reduce once, behind the last backward"
                    reduced.add(action.stage)


@rule("replicas reduce the gradients of every backward", PROGRAM_RULES)
def backwards_are_reduced(program: Program) -> Breaches:
    for rank in range(program.num_ranks) if _has_data_gradients(program) else ():
        for action, covered in _with_uncovered(program, rank):
            if action == covered:
                yield f"{action.with_op(Op.REDUCE_GRAD)} is missing", f"Add it to rank {rank}, behind {action}"


@rule("ranks that share parameters sum their gradients once, behind all backwards and other reductions", PROGRAM_RULES)
def shared_gradients_summed_once(program: Program) -> Breaches:
    if program.schedule.microbatches_per_update is not None:
        return
    group_of = {stage: group for group in program.gradient_groups for stage in group}
    for rank, order in enumerate(program.orders):
        summed: set[tuple[int, ...]] = set()
        for action in order:
            group, sums = group_of.get(action.stage), action.op is Op.REDUCE_GRAD
            if sums and action.microbatch is not None and program.data is not None and group not in summed:
                continue
            if sums and (group is None or rank not in program.ranks_of_group(group)):
                seen = f"{at(action, rank)}, which shares no gradients of stage {action.stage} with another rank"
                yield seen, "Remove it, or name the group in gradient_groups"
            elif group in summed and (sums or action.op in (Op.B, Op.W)):
                yield f"{at(action, rank)} comes after the sum of stages {group}", "Move the sum to the end"
            elif sums and group is not None:
                summed.add(group)
        for group in program.gradient_groups:
            held = [stage for stage in group if stage in program.placement.stages_of[rank]]
            if held and group not in summed:
                yield f"{Action(min(held), Op.REDUCE_GRAD)} is missing", f"Add it to the end of rank {rank}"


@rule("an update comes behind the last backward of its micro-batches, and no forward changes sides", PROGRAM_RULES)
def updates_of_a_stream(program: Program) -> Breaches:
    for rank, order in enumerate(program.orders) if program.schedule.microbatches_per_update is not None else ():
        planned = (action for action in with_updates(program.schedule, rank) if action.op in _AROUND_UPDATES)
        found = (action for action in order if action.op in _AROUND_UPDATES)
        for want, got in zip_longest(planned, found):
            if want != got:
                yield f"rank {rank} runs {got} in place of {want}", "Lower the schedule with pipeloom.passes.lower"


# --- activations -----------------------------------------------------------------------------------------------------


@rule("an activation is offloaded and reloaded at most once", PROGRAM_RULES)
def moves_once(program: Program) -> Breaches:
    yield from repeated((rank, action) for rank, action in program.actions() if action.op in _MOVES)


@rule("OFFLOAD comes between F and the backward, RELOAD between OFFLOAD and the backward", PROGRAM_RULES)
def activations_are_there(program: Program) -> Breaches:
    moves = any(action.op in _MOVES for _, action in program.actions())
    for rank, order in enumerate(program.orders) if moves else ():
        made: set[Action] = set()  # forwards whose activation is kept
        away: set[Action] = set()
        for action in order:
            forward = action.with_op(Op.F)
            if action.op is Op.F and not program.schedule.forward_only:
                made.add(forward)
            elif action.op is Op.OFFLOAD:
                if forward not in made:
                    yield f"{at(action, rank)}, where no activation is kept", f"Put it behind {forward}"
                away.add(forward)
            elif action.op is Op.RELOAD:
                if forward not in away:
                    yield f"{at(action, rank)}, where nothing is offloaded", "Put it behind its OFFLOAD"
                away.discard(forward)
            elif action.op in (Op.B, Op.I):
                made.discard(forward)
                if forward in away:
                    fix = f"Put {action.with_op(Op.RELOAD)} before it"
                    yield f"{at(action, rank)}, where its activation is offloaded", fix
