"""When a rank gathers a stage's parameters, frees them, and reduces their gradients over data-parallel replicas.

A rank's order consists of blocks (`ComputeBlock`): one computation or an overlapped pair, with its messages.
A run of a stage is a row of blocks with the stage: all blocks of the step, adjacent blocks, or single blocks.

    granularity step         0UNSHARD 2UNSHARD 0F0 0F1 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD1 0B0 0B1 ...
    granularity chunk        0UNSHARD 2UNSHARD 0F0 0F1 0RESHARD 2F0 2F1 ...    one run is gathered ahead
    granularity microbatch   0UNSHARD 0F0 0RESHARD 0UNSHARD 0F1 0RESHARD ...

UNSHARD begins a gather and REDUCE_GRAD completes the start of the reductions: the first computation that needs the
parameters waits for the gather, the end of the program for the reductions. What each does with the units of a stage,
and what the computations between them do, says `pipeloom.ir.unit_actions`. Stages that are gathered once per step are
gathered at its start, in the order of use, while the rank waits for its first message. A W needs no parameters. A
REDUCE_GRAD of the data axis has the micro-batch of the last backward that it covers; a REDUCE_GRAD without a
micro-batch is the sum over ranks of the pipeline that hold the same parameters.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from pipeloom.ir import Action, DataAxis, Granularity, Op, Program
from pipeloom.passes.blocks import ComputeBlock, blocks_of, woven

_BACKWARDS = frozenset({Op.B, Op.W})  # those that add to gradients
_Around = defaultdict[int, list[Action]]


def insert_data_parallel(program: Program, data: DataAxis, *, ahead: int = 1) -> Program:
    """Insert UNSHARD, RESHARD and REDUCE_GRAD of a data axis into a program with communication.

    A program without backwards (`Schedule.forward_only`) gets no REDUCE_GRAD.

    Args:
        program: what one replica runs.
        data: the data axis.
        ahead: at granularity chunk, the number of runs that a stage is gathered before its use; each holds one stage
            more in memory.
    """
    orders = []
    for rank, order in enumerate(program.orders):
        front: _Around = defaultdict(list)
        behind: _Around = defaultdict(list)
        blocks = blocks_of(order, program)
        places = _places(blocks)
        if data.unshards:
            _gather(program.placement.stages_of[rank], blocks, places, data, ahead, front, behind)
        if not program.schedule.forward_only:
            for stage in program.placement.stages_of[rank]:
                _reduce(stage, blocks, places[stage], data, behind)
        orders.append(woven(order, front, behind))
    return replace(program, orders=tuple(orders), data=data)


def _places(blocks: Sequence[ComputeBlock]) -> dict[int, list[int]]:
    """The blocks with each stage, by index."""
    found: dict[int, list[int]] = defaultdict(list)
    for index, block in enumerate(blocks):
        for stage in dict.fromkeys(action.stage for action in block.computations):
            found[stage].append(index)
    return found


def _gather(
    stages: Sequence[int],
    blocks: Sequence[ComputeBlock],
    places: Mapping[int, Sequence[int]],
    data: DataAxis,
    ahead: int,
    front: _Around,
    behind: _Around,
) -> None:
    """UNSHARD and RESHARD of all stages of a rank."""
    granularity = data.granularity if data.strategy.shards_parameters else Granularity.STEP
    ahead = {Granularity.STEP: len(blocks), Granularity.CHUNK: ahead, Granularity.MICROBATCH: 0}[granularity]
    runs = [(*run, stage) for stage in stages for run in _reading_runs(stage, blocks, places[stage], granularity)]
    # By first block; of an overlapped pair, the F is first.
    runs.sort(key=lambda run: (run[0], [a.stage for a in blocks[run[0]].computations].index(run[2])))
    gathered: dict[int, int] = {}  # the last block of a stage's run before
    for index, (first, last, stage) in enumerate(runs):
        begin = min(first, runs[max(0, index - ahead)][0])
        begin = max(begin, gathered.get(stage, -1) + 1)
        front[blocks[begin].first].append(Action(stage, Op.UNSHARD))
        if data.strategy.shards_parameters:
            behind[blocks[last].last].append(Action(stage, Op.RESHARD))
        gathered[stage] = last


def _reading_runs(
    stage: int, blocks: Sequence[ComputeBlock], places: Sequence[int], granularity: Granularity
) -> list[tuple[int, int]]:
    """The runs of a stage, from the first to the last computation that reads its parameters."""
    found = []
    for run in _runs(places, granularity):
        first = next((index for index in run if _reads(stage, blocks[index])), None)
        if first is not None:
            found.append((first, next(index for index in reversed(run) if _reads(stage, blocks[index]))))
    return found


def _reads(stage: int, block: ComputeBlock) -> bool:
    """Whether a computation of the block reads the parameters of the stage."""
    return any(action.stage == stage and action.op is not Op.W for action in block.computations)


def _reduce(stage: int, blocks: Sequence[ComputeBlock], places: Sequence[int], data: DataAxis, behind: _Around) -> None:
    """REDUCE_GRAD of one stage, behind the last backward of every run that has one."""
    granularity = data.granularity if data.strategy.shards_gradients else Granularity.STEP
    for run in _runs(places, granularity):
        backwards = (
            (blocks[index], action)
            for index in reversed(run)
            for action in reversed(blocks[index].computations)
            if action.stage == stage and action.op in _BACKWARDS
        )
        for block, action in islice(backwards, 1):
            behind[block.last].append(action.with_op(Op.REDUCE_GRAD))


def _runs(places: Sequence[int], granularity: Granularity) -> list[list[int]]:
    """The blocks with a stage, of every run."""
    runs: list[list[int]] = []
    for index in places:
        follows = bool(runs) and index == runs[-1][-1] + 1
        if runs and (granularity is Granularity.STEP or (granularity is Granularity.CHUNK and follows)):
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
