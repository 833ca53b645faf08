"""The program's UNSHARD, RESHARD and REDUCE_GRAD, unit by unit, against what a run does and records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

import pipeloom as pl
from pipeloom.ir import Action, DataStrategy, Op, Program
from pipeloom.parallel.data.buckets import BucketRule, group_parameters, units_by_layer
from pipeloom.parallel.data.layer_hooks import parameter_uses
from pipeloom.parallel.data.unit import Unit
from pipeloom.parallel.data.unit_gradients import UnitGradients
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens
from tests.unit_program import unit_actions_of_rank

CASES = [
    (strategy, granularity, family)
    for strategy in DataStrategy
    for granularity in (("step", "microbatch") if strategy.shards_gradients else ("step",))
    for family in ("bfs", "zb-h1")
]


class Event(NamedTuple):
    """A unit of a stage is gathered, freed or reduced.

    Attributes:
        during: the program's action that does it.
        gathered_bytes: of all units together, afterwards.
    """

    op: Op
    stage: int
    unit: int
    during: Action
    gathered_bytes: int


def expected(program: Program, pipe: pl.Pipeline) -> Iterator[Event]:
    """What the program says, from its order and the grouping of parameters alone."""
    data = program.data
    assert data is not None
    (store,) = pipe.state.stores.values()
    layers, sizes = {}, {}
    for stage, module in pipe.state.stages.items():
        names = [name for name, _ in module.named_modules() if _is_layer(name)]
        parameters = dict(module.named_parameters())
        uses = parameter_uses(module, names, parameters, dict.fromkeys(parameters, (stage,)), lambda p: p.nbytes)
        groups = group_parameters(uses, BucketRule.of(data.granularity, 0, whole_parameters=False))
        units = [[uses[position] for position in group] for group in sorted(groups, key=min)]
        layers[stage] = units_by_layer(units, len(names))
        sizes[stage] = [size for size, _ in store.unit_bytes()[stage]]
        assert len(sizes[stage]) == len(units)
    held = 0
    for action, (op, unit) in unit_actions_of_rank(
        program, 0, layers, {stage: len(found) for stage, found in sizes.items()}
    ):
        if data.strategy.shards_parameters:
            held += {Op.UNSHARD: 1, Op.RESHARD: -1}.get(op, 0) * sizes[action.stage][unit]
        yield Event(op, action.stage, unit, action, held)


def _is_layer(name: str) -> bool:
    return name in ("embedding", "norm", "head") or (name.startswith("blocks.") and name.count(".") == 1)


def watched(pipe: pl.Pipeline) -> list[Event]:
    """What the run does, from now on."""
    (store,) = pipe.state.stores.values()
    where = {unit: (stage, n) for stage, units in store._by_stage.items() for n, unit in enumerate(units)}
    of_gradients = {unit.gradients: place for unit, place in where.items()}
    events: list[Event] = []

    def note(op: Op, place: tuple[int, int]) -> None:
        assert store.times.action is not None
        events.append(Event(op, *place, store.times.action, store.gathered.now))

    start_gather, free, start = Unit.start_gather, Unit.free, UnitGradients.start

    def gather(self: Unit) -> None:
        begins = not self.filled and self._gathering is None
        start_gather(self)
        if begins and self._gathering is not None:
            note(Op.UNSHARD, where[self])

    def freed(self: Unit) -> None:
        there = self.filled or self._gathering is not None
        free(self)
        if there and not self.filled and store.times.action is not None:
            note(Op.RESHARD, where[self])

    def reduce(self: UnitGradients, look: object) -> None:
        start(self, look)
        note(Op.REDUCE_GRAD, of_gradients[self])

    Unit.start_gather, Unit.free, UnitGradients.start = gather, freed, reduce  # this process ends with the test
    return events


def _run(rank: int, strategy: str, granularity: str, family: str) -> int:
    chunks = {"num_chunks": 2} if family == "bfs" else {}
    schedule = pl.schedules.build(family, num_ranks=1, num_microbatches=2, **chunks)
    data = pl.DataParallel(strategy, None if granularity == "step" else granularity, "elements", 0)
    inputs, targets = (values.chunk(2)[rank] for values in tokens(8, seed=1))
    with pl.Pipeline(make_gpt(), schedule, loss_fn=language_loss, mesh=pl.Mesh(dp=2), data=data) as pipe:
        wanted = list(expected(pipe.program, pipe))
        events = watched(pipe)
        pipe.step(inputs, targets)
        assert events == wanted
        ((_, rows),) = pipe.records
    spans = {action: (start, end) for action, start, end in rows}
    collectives = sorted((start, action) for action, start, _ in rows if action.op in (Op.UNSHARD, Op.REDUCE_GRAD))
    sent = [event for event in wanted if event.op is not Op.RESHARD]
    assert len(collectives) == len(sent)
    for (start, action), event in zip(collectives, sent, strict=True):
        during = event.during
        named = Action(event.stage, Op.UNSHARD) if event.op is Op.UNSHARD else during.with_op(Op.REDUCE_GRAD)
        assert action == named
        if during.op in (Op.F, Op.B, Op.I, Op.W):
            assert spans[during][0] <= start <= spans[during][1], (action, during)
    return len(sent)


@pytest.mark.parametrize(("strategy", "granularity", "family"), CASES)
def test_units_are_gathered_freed_and_reduced_as_the_program_says(strategy, granularity, family) -> None:
    counts = run_ranks(_run, 2, strategy, granularity, family)
    assert counts[0] == counts[1] > 0
