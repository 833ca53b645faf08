"""On an asynchronous device the F and the B of an overlapped pair are in two streams, and all else is in order.

The device here computes at once, and keeps for each of its streams what is certain to be over when the stream goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.devices import HostDevice, device_of
from pipeloom.devices.device import Stream
from pipeloom.engine.pair_streams import PairStreams, in_turn
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Op, Schedule
from pipeloom.parallel import OffloadActivations
from pipeloom.parallel.axis_forms import GroupAxis
from pipeloom.passes import lower
from tests.cpu.every_schedule import Case, train_and_compare
from tests.cpu.fake_graphs import FakeGraphs
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens

Before = set[tuple[int, Action]]  # by rank


class TwoStreams(HostDevice):
    """Each thread has streams of its own.

    Attributes:
        over: by stream, what is over when it goes on.
        used: streams and tensors of `used_here`.
    """

    is_asynchronous = True

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device)
        self._local = threading.local()
        self.used: list[tuple[str, int]] = []

    @property
    def current(self) -> str:
        return getattr(self._local, "current", "first")

    @property
    def over(self) -> Before:
        streams: dict[str, Before] = self._local.__dict__.setdefault("streams", {})
        return streams.setdefault(self.current, set())

    def mark(self) -> Before:
        return set(self.over)

    def wait(self, mark: Before | None) -> None:
        assert mark is not None, "a mark was lost"
        self.over.update(mark)

    def used_here(self, tensor: Tensor) -> None:
        self.used.append((self.current, tensor.data_ptr()))

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self._local.current = self.current, str(stream)
        try:
            yield
        finally:
            self._local.current = before

    def is_in(self, stream: Stream) -> bool:
        return self.current == stream

    def receive(self, tensor: Tensor, ready: Before | None) -> Tensor:
        self.wait(ready)
        return tensor


@pytest.fixture
def two_streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device_of.cache_clear()
    monkeypatch.setattr("pipeloom.devices.HostDevice", TwoStreams)
    yield
    device_of.cache_clear()


def device() -> TwoStreams:
    found = device_of(torch.device("cpu"))
    assert isinstance(found, TwoStreams)
    return found


def ordered(pipe: pl.Pipeline, step: Callable[[], Any]) -> dict[tuple[int, Action], tuple[str, Before]]:
    """The stream of every computation of a step, and what was certain to be over when it began."""
    found = {}

    def wrap(state: RankState, action: Action, given: Step) -> Step:
        run, ready = given
        key = (state.wiring.rank, action)

        def noted() -> None:
            here = device()
            if action.op in (Op.F, Op.B, Op.I, Op.W):
                found[key] = (here.current, set(here.over))
            run()
            here.over.add(key)

        return noted, ready

    with pipe.executor.wrapping(wrap):
        step()
    return found


def gpt_in_pairs(schedule: Schedule, transport: str = "loopback") -> tuple[pl.Pipeline, Callable[[], Any]]:
    model = make_gpt(layers=schedule.num_stages)
    pipe = pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport)
    batch = tokens(2 * schedule.num_microbatches)
    return pipe, lambda: pipe.step(*batch)


SCHEDULES = [("dualpipe", 2, 6), ("dualpipe", 4, 8), ("dualpipev", 2, 4), ("dualpipev", 4, 8)]


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SCHEDULES)
def test_pairs_alone_run_side_by_side(
    two_streams: None, name: str, num_ranks: int, num_microbatches: int, transport: str
) -> None:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    pipe, step = gpt_in_pairs(schedule, transport)
    with pipe:
        assert pipe.schedule.overlapped == schedule.overlapped
        found = ordered(pipe, step)
        num_beside = 0
        for rank, order in enumerate(pipe.schedule.orders):
            for at, second in enumerate(order):
                for first in order[:at]:
                    over = (rank, first) in found[rank, second][1]
                    pair = (first, second) in schedule.overlapped
                    assert over or pair, f"rank {rank}: {second} may begin before {first} is over"
                    if pair:
                        assert not over
                        assert (rank, second) not in found[rank, first][1]
                        assert {found[rank, first][0], found[rank, second][0]} == {"first", "second"}
                        num_beside += 1
        assert num_beside == len(schedule.overlapped) > 0


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SCHEDULES)
def test_results_of_other_ranks_and_streams_have_arrived(
    two_streams: None, name: str, num_ranks: int, num_microbatches: int
) -> None:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    pipe, step = gpt_in_pairs(schedule)
    with pipe:
        found = ordered(pipe, step)
        where, last = {action: rank for rank, action in found}, schedule.num_stages - 1
        for (_, action), (_, over) in found.items():
            stage, op, microbatch, piece = action
            needed = []
            if op is Op.F and stage:
                needed = [Action(stage - 1, Op.F, microbatch, piece)]
            elif op in (Op.B, Op.I):
                needed = [Action(stage, Op.F, microbatch, piece)]
                later = (Action(stage + 1, each, microbatch, piece) for each in (Op.B, Op.I))
                needed += [each for each in later if stage < last and each in where]
            for each in needed:
                assert (where[each], each) in over, f"{action} may begin before {each} is over"


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SCHEDULES)
def test_numbers_are_those_without_pairs(name: str, num_ranks: int, num_microbatches: int, request: Any) -> None:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    batch, results = tokens(2 * num_microbatches), []
    for with_pairs in (False, True):
        if with_pairs:
            request.getfixturevalue("two_streams")
        model = make_gpt(layers=schedule.num_stages)
        with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe:
            assert bool(pipe.schedule.overlapped) is with_pairs
            losses = [pipe.step(*batch), pipe.step(*batch)]
            results.append([*losses, *gradients(model)])
            evaluated = pipe.forward(batch[0])
            assert evaluated is not None
            results[-1].append(evaluated)
    assert len(results[0]) == len(results[1])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_values_that_pass_between_streams_are_kept_for_both(two_streams: None) -> None:
    schedule = pl.schedules.build("dualpipev", num_ranks=2, num_microbatches=4)  # rank 1 has stages 1 and 2
    pipe, step = gpt_in_pairs(schedule)
    with pipe:
        device().used.clear()
        step()
        per_stream = [stream for stream, _ in device().used]
        # 4 outputs of stage 1 that stage 2 reads, 4 gradients that come back.
        assert per_stream.count("second") == 4
        assert per_stream.count("first") == 4
        device().used.clear()
        device().device = torch.device("cpu", 0)  # tensors of "cpu" are not its own
        step()
        assert device().used == []


def test_the_host_starts_the_backward_first(two_streams: None) -> None:
    schedule = pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)
    pipe, step = gpt_in_pairs(schedule)
    with pipe:
        started = list(ordered(pipe, step))
    for rank, order in enumerate(schedule.orders):
        for action in order:
            partner = schedule.partners.get(action)
            if partner is not None:
                assert started.index((rank, partner)) < started.index((rank, action))


@pytest.mark.parametrize("second", [0, 1])
@pytest.mark.parametrize("ends", [(), (1,), (7, 20)])
def test_a_run_in_parts_comes_between_what_is_before_and_after_each(ends: tuple[int, ...], second: int) -> None:
    program, here = lower(pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)), TwoStreams()
    order = program.orders[0]
    streams = PairStreams(here, program, 0, order, frozenset({second}))
    between = Action(0, Op.STEP)
    for start, end in pairwise((0, *ends, len(order))):
        here.over.add((start, between))  # in the first stream, where an optimizer works
        with streams.running():
            for position in range(start, end):
                with streams.at(position):
                    assert (start, between) in here.over
                    here.over.add((0, order[position]))
        assert here.over >= {(0, action) for action in order[:end]}


def test_after_an_error_in_the_second_stream_the_first_one_goes_on_behind_it() -> None:
    program, here = lower(pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)), TwoStreams()
    order = program.orders[0]
    streams = PairStreams(here, program, 0, order, frozenset({0}))
    with suppress(RuntimeError), streams.running(), streams.at(0):
        here.over.add((0, order[0]))
        raise RuntimeError
    assert (0, order[0]) in here.over


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), SCHEDULES)
def test_steps_and_evaluations_are_as_without_pairs(
    two_streams: None, name: str, num_ranks: int, num_microbatches: int, checkpointed: bool
) -> None:
    """Losses, gradients, evaluations and the peak of live activations."""
    train_and_compare(
        Case(name, num_ranks, 2, num_microbatches, uneven=False, tied=False, checkpointed=checkpointed), "loopback"
    )


@pytest.mark.parametrize("kind", ["graphs", "offload", "tied", "host"])
def test_without_two_streams_pairs_run_in_turn(
    kind: str, request: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options: dict[str, Any] = {}
    if kind != "host":
        request.getfixturevalue("two_streams")
    if kind == "graphs":
        monkeypatch.setattr(TwoStreams, "graphs", lambda self: FakeGraphs())
        options["graphs"] = True
    elif kind == "offload":
        options["offload"] = OffloadActivations(f"disk:{tmp_path}")
    schedule = pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)
    model = make_gpt(tied=kind == "tied", layers=2)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, **options) as pipe:
        assert not pipe.schedule.overlapped


@pytest.mark.parametrize("granularity", ["step", "chunk", "microbatch"])
def test_pairs_run_in_turn_where_replicas_gather_or_reduce_inside_a_step(two_streams: None, granularity: str) -> None:
    schedule = pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)
    data = pl.DataParallel("zero2", granularity=granularity)

    def pairs() -> int:
        with pl.Mesh(pp=2, dp=2) as mesh:
            pipe = pl.Pipeline(make_gpt(layers=2), schedule, loss_fn=language_loss, mesh=mesh, data=data)
            with pipe:
                return len(pipe.schedule.overlapped)

    wanted = len(schedule.overlapped) if granularity == "step" else 0
    assert pl.run_threads(4, pairs, timeout_seconds=60.0) == [wanted] * 4


def test_the_time_of_a_pair_is_counted_once() -> None:
    f0, f1, b0, b1 = (Action(0, op, microbatch) for op in (Op.F, Op.B) for microbatch in (0, 1))
    # The host started the backward first; they ran side by side for 2 of 5 seconds.
    records = [(f0, 10.0, 11.0), (b0, 11.0, 14.0), (f1, 12.0, 16.0), (b1, 16.0, 18.0)]
    middle = pytest.approx(11.0 + 5.0 * 4 / 7)
    assert in_turn(records, {f1: b0}) == [
        (f0, 10.0, 11.0),
        (f1, 11.0, middle),
        (b0, middle, 16.0),
        (b1, 16.0, 18.0),
    ]


def test_a_run_has_records_of_pairs_in_turn(two_streams: None) -> None:
    schedule = pl.schedules.build("dualpipe", num_ranks=2, num_microbatches=6)
    pipe, step = gpt_in_pairs(schedule)
    with pipe:
        step()
        for _, records in pipe.records:
            rows = [row for row in records if row[0].op in (Op.F, Op.B, Op.I, Op.W)]
            for (first, _, end), (second, start, _) in pairwise(rows):
                assert end <= start
                assert schedule.partners.get(first, second) == second


def _both_streams(rank: int) -> list[list[float]]:
    """Rank 0 reduces in the first stream, then in the second; rank 1 begins with the second."""
    members, group = [0, 1], dist.new_group()
    axis = GroupAxis("ep", group, members)
    two = TwoStreams()
    axis.overlap(dist.new_group(), two)
    found: dict[str, Tensor] = {}
    began = threading.Event()

    def second() -> None:
        with two.on(Stream.SECOND):
            began.set()
            found["second"] = axis.all_reduce(torch.full((5,), 1.0 + rank))

    thread = threading.Thread(target=second)
    if rank == 1:
        thread.start()
        began.wait()
        time.sleep(0.2)  # by then it waits for rank 0
    found["first"] = axis.all_reduce(torch.full((3,), 10.0 + rank))
    if rank == 0:
        thread.start()
    thread.join()
    return [found["first"].tolist(), found["second"].tolist()]


def test_collectives_of_two_streams_have_groups_of_their_own() -> None:
    assert run_ranks(_both_streams, 2) == [[[21.0] * 3, [3.0] * 5]] * 2
