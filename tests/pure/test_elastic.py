"""Layouts of elastic runs, and when their launcher goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeloom.errors import InputError, PeerLost
from pipeloom.processes import preemption
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.elastic.copy_head import BEGUN, SEAL, common_step, write_number
from pipeloom.processes.elastic.generation import End, Generation
from pipeloom.processes.launcher import HUNG
from pipeloom.processes.preemption import GROW, PREEMPTED, Request
from pipeloom.processes.recovery.lifeline import PEER_LOST, Lifeline, Memories, Rerouted
from pipeloom.processes.recovery.recoveries import Recoveries, Rerouting, Tether, Tethers
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.elastic import run as elastic_run
from pipeloom.train.elastic.layouts import fit, fit_torchrun
from pipeloom.train.elastic.rerouting import keeps_stages, rerouted, survivors
from pipeloom.train.elastic.source import ENTRY, Source, newest


def job(
    schedule: str | None = None, layers: int = 8, size: int = 32, microbatches: int = 8, **parallel: Any
) -> TrainConfig:
    config = TrainConfig(elastic=True, schedule=schedule).changed("model", layers=layers)
    return config.changed("batch", size=size, microbatches=microbatches).changed("parallel", **parallel)


@pytest.mark.parametrize(
    ("config", "count", "exact", "words"),
    [
        (job(pipeline=4), 4, False, "4 ranks: parallel.pipeline=4, parallel.data=1, batch.microbatches=8"),
        (job(pipeline=4), 3, False, "3 ranks: parallel.pipeline=3, parallel.data=1, batch.microbatches=8"),
        (job(pipeline=1, data=2), 1, False, "1 rank: parallel.pipeline=1, parallel.data=1, batch.microbatches=16"),
        # A third rank makes the stages smaller, where there are blocks for that.
        (job(pipeline=2, data=2), 3, False, "3 ranks: parallel.pipeline=3, parallel.data=1, batch.microbatches=16"),
        (job(pipeline=2, data=2, layers=4), 3, False, "2 ranks: parallel.pipeline=2, parallel.data=1, "),
        # No rank gets a larger stage than before: three may be left over, except under torchrun.
        (job(pipeline=4, data=2), 7, False, "4 ranks: parallel.pipeline=4, parallel.data=1, batch.microbatches=16"),
        (job(pipeline=4, data=2), 7, True, "7 ranks: parallel.pipeline=7, parallel.data=1, batch.microbatches=16"),
        (job(pipeline=2), 8, True, "8 ranks: parallel.pipeline=2, parallel.data=4, batch.microbatches=2"),
        (job(pipeline=2, data=-1), 3, True, "3 ranks: parallel.pipeline=3, parallel.data=1, batch.microbatches=8"),
        (job(pipeline=4, chunks=2, schedule="interleaved"), 3, False, "schedule=1f1b in place of interleaved"),
        (job(pipeline=4, schedule="dualpipe"), 3, False, "schedule=1f1b in place of dualpipe"),
        (job(pipeline=4, schedule="zb-h1"), 3, False, "3 ranks: parallel.pipeline=3, parallel.data=1, "),
        (job(pipeline=2, cut="5,3"), 1, False, "1, batch.microbatches=8, parallel.cut=layers in place of 5,3"),
        (job(pipeline=2, tensor=2), 3, False, "2 ranks: parallel.pipeline=1, parallel.data=1"),
        (job(pipeline=1, tensor=2), 1, False, "1 rank: parallel.pipeline=1, parallel.data=1, batch.microbatches=8, "
         "parallel.tensor=1 in place of 2"),
        (job(pipeline=2).changed("memory", recompute="selective,full"), 1, False, "memory.recompute=full in place of"),
    ],
)  # fmt: skip
def test_a_layout_fits_the_processes(config: TrainConfig, count: int, exact: bool, words: str) -> None:
    found = fit(config, count, exact=exact)
    assert words in found.words
    assert found.config.num_processes == count if exact else found.config.num_processes <= count
    assert found.config.batch.size == config.batch.size
    validate_settings(found.config)


@pytest.mark.parametrize(
    ("config", "lost", "words"),
    [
        (job(pipeline=4, data=2), [5], "7 ranks: parallel.pipeline=4, parallel.replicas=2,1,2,2, "),
        (job(pipeline=4, data=2, order="pp,dp"), [4, 7], "6 ranks: parallel.pipeline=4, parallel.replicas=2,2,1,1, "),
        (job(pipeline=2, data=2), [0, 3], "2 ranks: parallel.pipeline=2, parallel.data=1, batch.microbatches=16"),
        (job(pipeline=2, data=3), [5], "5 ranks: parallel.pipeline=2, parallel.replicas=3,2, batch.microbatches=24"),
        (job(pipeline=2, replicas="3,2", microbatches=24), [3], "4 ranks: parallel.pipeline=2, parallel.replicas=3,1"),
        (job(pipeline=2, data=2, cut="5,3"), [2], "parallel.replicas=1,2, batch.microbatches=16"),
        (job(pipeline=2, data=2, chunks=2, cut="2,2,2,2", schedule="interleaved"), [2], "parallel.replicas=1,2, "
         "batch.microbatches=16, parallel.cut=layers in place of 2,2,2,2, schedule=1f1b in place of interleaved"),
        (job(pipeline=2, data=2), [1, 3], None),  # stage 1 has no rank left
        (job(pipeline=2, replicas="2,1"), [2], None),
    ],
)  # fmt: skip
def test_peers_take_the_micro_batches_of_lost_ranks(config: TrainConfig, lost: list[int], words: str | None) -> None:
    config = replace(config, reroute=True)
    validate_settings(config)
    found = rerouted(config, lost)
    assert (found is None) == (words is None)
    if words is not None and found is not None:
        assert words in found.words
        assert found.config.num_processes == config.num_processes - len(lost)
        assert found.config.batch.size == config.batch.size
    assert rerouted(replace(config, reroute=False), lost) is None
    assert rerouted(replace(config, min_ranks=config.num_processes), lost) is None
    assert not fit(config, 1, exact=False).config.reroute  # one rank has no peer


def test_ranks_that_keep_their_stages_are_known() -> None:
    config = job(pipeline=2, data=2, order="pp,dp")
    assert survivors(config, [2]) == [(0, 0), (0, 1), (1, 3)]
    assert survivors(job(pipeline=2, data=2), [2]) == [(0, 0), (1, 1), (1, 3)]
    assert survivors(job(pipeline=2, replicas="2,1"), [0]) == [(0, 1), (1, 2)]
    assert keeps_stages(config)
    assert keeps_stages(job(pipeline=2, replicas="2,1"))
    assert keeps_stages(job(pipeline=2, data=2, schedule="zb-h1"))
    for other in ({"cut": "time"}, {"schedule": "dualpipe"}, {"schedule": "interleaved", "chunks": 2}):
        assert not keeps_stages(job(**{"pipeline": 2, "data": 2, **other}))


def test_there_may_be_no_layout() -> None:
    config = job(pipeline=2, layers=2, size=3, microbatches=1)
    with pytest.raises(InputError, match="7 processes: the run has no layout for them"):
        fit(config, 7, exact=True)
    limited = TrainConfig(elastic=True, min_ranks=2, max_ranks=4)
    with pytest.raises(InputError, match="1 processes: fewer than min_ranks=2"):
        fit(limited, 1, exact=False)
    with pytest.raises(InputError, match="5 processes: more than max_ranks=4"):
        fit_torchrun(limited, 5)
    assert fit_torchrun(limited, 4).config.resume_from_checkpoint == "auto"


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (TrainConfig(elastic=True, local=True), "one process holds all ranks"),
        (TrainConfig(elastic=True, schedule="pipedream"), "as stale as there are stages"),
        (TrainConfig(elastic=True, min_ranks=3, max_ranks=2), "max_ranks=2: below min_ranks=3"),
        (TrainConfig(elastic=True, preempt_seconds=0), "preempt_seconds=0: with --elastic"),
        (TrainConfig(min_ranks=2), "min_ranks=2: has no effect without --elastic"),
        (TrainConfig(reroute=True), "reroute=true: has no effect without --elastic"),
        (TrainConfig(elastic=True, reroute=True), "parallel.data=1, no other rank holds the stage"),
        (replace(job(data=2, data_strategy="zero1"), reroute=True), "reroute=true with parallel.data_strategy=zero1"),
        (replace(job(data=2, tensor=2), reroute=True), "reroute=true with parallel.tensor=2"),
        (TrainConfig(copy_steps=2), "copy_steps=2: has no effect without --recover and --elastic"),
    ],
)
def test_options_that_do_not_fit_are_refused(config: TrainConfig, text: str) -> None:
    with pytest.raises(InputError, match=text):
        validate_settings(config)


def request(*numbers: int) -> Request:
    """A launcher's, which has received signals."""
    found = Request(10.0)
    found.signals += numbers
    return found


def ranks(count: int, steps: float = 1.0) -> list[Any]:
    boxes = [BlackBox() for _ in range(count)]
    for box in boxes:
        box.enter("step 7, update", patient=False)
        box.steps = steps
    return [SimpleNamespace(black_box=box) for box in boxes]


def generation(
    count: int,
    *,
    num_more: int = 0,
    grown: bool = False,
    grow_seconds: float | None = None,
    first: int = 1,
    reroute: Callable[[Collection[int]], Rerouting | None] = lambda _: None,
) -> Generation:
    found = Generation(
        range(count), num_more=num_more, grow_seconds=grow_seconds, grown=grown, before=(), variables={}, first=first,
        lends=False, survives=lambda lost: lost < count, copied=lambda: None, reroute=reroute,
    )  # fmt: skip
    write_number(found.tethers.by_rank[-1].memories.copies[0], BEGUN, 7)
    return found


@pytest.mark.parametrize(
    ("codes", "grown", "steps", "lost"),
    [
        ((None, -9, None), False, 1, (1,)),
        ((PEER_LOST, -9, -11), False, 1, (1, 2)),
        ((-9, -9, -9), False, 1, None),  # no rank is left
        ((None, -9, 1), False, 1, None),  # an error of another rank would come again
        ((1, PEER_LOST, None), False, 1, None),
        ((1, PEER_LOST, None), True, 0, (0,)),  # a rank that cannot start again
        ((1, PEER_LOST, None), True, 1, None),
        ((HUNG, HUNG, None), False, 1, None),
        ((0, 0, 0), False, 1, None),
    ],
)
def test_a_run_goes_on_without_the_ranks_that_were_killed(
    codes: tuple[int | None, ...], grown: bool, steps: int, lost: tuple[int, ...] | None
) -> None:
    found = generation(3, grown=grown)
    found.note(ranks(3, steps), codes, "how", request())
    assert (found.end and found.end.lost) == lost
    assert found.end is None or (found.end.text, found.end.begun, found.end.grows) == ("how", 7, False)
    ended = generation(3, grown=grown)
    ended.note(ranks(3, steps), codes, "how", request(2))
    assert ended.end is None
    asked = generation(3, grown=grown)
    asked.note(ranks(3, steps), codes, "how", request(15))  # those that start save for it
    assert asked.end == found.end
    asked.tethers.close()
    found.tethers.close()
    ended.tethers.close()


def test_steps_count_again_from_where_the_lost_ranks_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks are lost in step 7, in step 5 and as they start; each time, all go back to step 4."""
    source, counted = Source(4, (Tether(),)), list[int]()
    monkeypatch.setattr(elastic_run, "newest", lambda *_: (source, []))
    with ExitStack() as stack:
        found = elastic_run._ElasticRun(replace(job(pipeline=4), output_dir=str(tmp_path)), stack)
        for begun in (7, 5, 0):
            lost = generation(len(found._usable))
            found._next(lost, End((0,), "rank 0 was killed", begun, False))
            counted.append(json.loads(found._source.variables(found._begun)[ENTRY])["again"])
    assert counted == [3, 1, 1]
    assert capsys.readouterr().err.count("the run goes on from the copies in memory of step 4 with ") == 3


@pytest.mark.parametrize(("first", "lost"), [(0, None), (6, (1,))])
def test_a_rank_that_is_killed_as_it_starts_ends_a_run_that_has_not_begun(
    first: int, lost: tuple[int, ...] | None
) -> None:
    running = ranks(3, 0.0)
    running[1].black_box.enter("", patient=True)
    found = generation(3, first=first)
    found.note(running, (None, -9, None), "how", request())
    assert (found.end and found.end.lost) == lost
    found.tethers.close()


def test_a_run_grows_once_all_ranks_have_made_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    full, fewer, timed = generation(2), generation(2, num_more=1), generation(2, num_more=1, grow_seconds=0.0)
    started, running, asked = ranks(2, 0.0), ranks(2), request(GROW)
    assert not full.wants_to_grow(asked, running)
    assert asked.signals == []
    assert "SIGUSR2: the run has 2 ranks, all it may" in capsys.readouterr().err
    assert not fewer.wants_to_grow(request(), running)
    assert not fewer.wants_to_grow(request(GROW), started)
    assert fewer.wants_to_grow(request(), running)
    assert [rank.black_box.grows for rank in running] == [1.0, 1.0]
    assert not fewer.wants_to_grow(request(), running)  # they have been asked
    fewer.note(running, (PREEMPTED, PREEMPTED), "", request())
    assert fewer.end is not None
    assert fewer.end.grows
    assert timed.wants_to_grow(request(), ranks(2))
    timed.note(running, (PREEMPTED, PREEMPTED), "", request(15))  # the machine is about to be taken away
    assert timed.end is None
    for each in (full, fewer, timed):
        each.tethers.close()


def test_a_signal_while_ranks_save_for_more_ranks_is_a_preemption(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [
        SimpleNamespace(process=SimpleNamespace(pid=0, returncode=0), black_box=each.black_box) for each in ranks(2)
    ]
    clock = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])
    found = request()
    found.ask(running)
    clock[0] += 1000.0  # no limit, where the launcher asks
    assert found.ending(running, begun=True) is None
    found.signals.append(15)
    assert found.ending(running, begun=True) is None  # they save already, now within the limit
    clock[0] += 17.0
    assert found.ending(running, begun=True) is None
    clock[0] += 2.0
    assert found.ending(running, begun=True) == 15
    assert request(2).ending(running, begun=True) == 2
    grows = request(GROW)  # while ranks start
    assert grows.ending((), begun=True) is None
    assert grows.signals == [GROW]


@pytest.mark.parametrize(
    ("seconds", "second", "end"), [(0.5, [], None), (20.0, [], 10), (5.0, [15], 15), (0.5, [15], None)]
)
def test_a_signal_while_ranks_start_after_a_loss_is_kept_until_they_are_ready(
    monkeypatch: pytest.MonkeyPatch, seconds: float, second: list[int], end: int | None
) -> None:
    clock, told = [100.0], list[int]()
    monkeypatch.setattr(preemption.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(preemption.os, "kill", lambda pid, _: told.append(pid))
    running = [
        SimpleNamespace(process=SimpleNamespace(pid=pid, returncode=None), black_box=each.black_box)
        for pid, each in enumerate(ranks(2))
    ]
    assert request(10).ending(running[:0], begun=False) == 10  # there is nothing to save yet
    found = request(10)
    assert found.ending((), begun=True) is None
    running[1].black_box.enter("", patient=True)
    clock[0] += seconds
    found.signals += second
    assert found.ending(running, begun=True) == end
    assert told == []
    running[1].black_box.enter("setup", patient=True)
    for _ in range(2):  # a second signal would end the processes
        assert found.ending(running, begun=True) == end
    assert told == ([] if end else [0, 1])
    again = SimpleNamespace(process=SimpleNamespace(pid=2, returncode=None), black_box=running[1].black_box)
    assert found.ending([running[0], again], begun=True) == end
    assert told == ([] if end else [0, 1, 2])


def test_ranks_go_on_without_others_that_are_lost_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    tethers, running = Tethers(4), ranks(4)
    met = list[bool]()
    lines, own = [], [tether.memories for tether in tethers.by_rank]
    for rank, each in enumerate(running):
        copied = [Memories(tuple(map(os.dup, copies)), os.dup(notes)) for copies, notes in own]
        end, table = os.dup(tethers.by_rank[rank].end), ";".join(map(str, copied))
        lines.append(Lifeline(f"{end}:{rank}:0:{table}", each.black_box))

    def reroute(lost: Collection[int]) -> Rerouting | None:
        order = tuple(rank for rank in range(len(running)) if rank not in lost)
        if len(order) < 2:
            return None
        running[:] = [running[rank] for rank in order]
        return Rerouting(order, tuple(map(str, order)), f"{len(order)} go on", f"of {len(order)}")

    def never(rank: int, generation: int) -> Any:
        raise AssertionError("no rank starts again")

    recoveries = Recoveries(0, tethers, never, met.append, reroute)
    assert not recoveries.recovers(running, [None, 1, None, -9], lambda _: "no")  # an error would come again
    assert recoveries.recovers(running, [None, -9, None, None], lambda lost: f"lost {[*lost]}")
    assert recoveries.pending
    for line in (lines[0], lines[2], lines[3]):
        assert line.noticed(PeerLost(""))
        assert line.generation == 1
    assert recoveries.recovers(running, [None, None, -9], lambda lost: f"lost {[*lost]}")  # on its way
    for each in running:
        each.black_box.ready = 1.0
    assert recoveries.recovers(running, [None, None], lambda _: "")
    assert not recoveries.pending
    for rank, line in enumerate((lines[0], lines[2])):
        before = line.memories
        _, loss = line.meet()
        assert (loss.text, line.rerouted) == ("lost [1]", Rerouted(rank, "of 2"))
        assert line.memories == [before[0], before[2]]
        for each in (before[1], before[3]):  # else the memory of lost ranks would not be free
            for descriptor in (*each.copies, each.notes):
                with pytest.raises(OSError, match="Bad file descriptor"):
                    os.fstat(descriptor)
    assert met == [False]  # no rank may be started again
    for each in (memories for line in lines for memories in line.memories):
        each.close()
    assert not recoveries.recovers(running, [None, -9], lambda _: "lost")  # all end
    assert capsys.readouterr().err.splitlines() == [
        "pipeloom: warning: lost [1]; 3 go on",
        "pipeloom: warning: lost [2]; 2 go on",
    ]
    tethers.close()


def test_ranks_that_are_lost_at_once_are_one_recovery(capsys: pytest.CaptureFixture[str]) -> None:
    tethers, running = Tethers(3), ranks(3)
    met = list[bool]()
    recoveries = Recoveries(2, tethers, lambda *_: ranks(1)[0], met.append)
    assert recoveries.recovers(running, [-9, None, -9], lambda _: "lost")
    for each in running:
        each.black_box.ready = 1.0
    assert recoveries.recovers(running, [None] * 3, lambda _: "")
    assert met == [True]
    assert recoveries.recovers(running, [-9] * 3, lambda _: "lost")
    for each in running:
        each.black_box.ready = 2.0
    assert recoveries.recovers(running, [None] * 3, lambda _: "")
    assert met == [True, False]
    assert capsys.readouterr().err.splitlines() == [
        "pipeloom: warning: lost; 2 ranks are started again, and the other ranks keep their processes (recovery 1 of "
        "at most 2)",
        "pipeloom: warning: lost; 3 ranks are started again (recovery 2 of at most 2)",
    ]
    tethers.close()


def test_a_generation_without_some_ranks_can_grow() -> None:
    asked: list[list[int]] = []

    def reroute(lost: Collection[int]) -> Rerouting:
        asked.append(list(lost))
        return Rerouting((0, 2), ("a", "b"), "", "")

    found = generation(3, grow_seconds=0.0, reroute=reroute)
    assert not found.wants_to_grow(request(), ranks(3))
    assert found.goes_on_without([1]) is not None
    assert found.slots == (0, 2)
    assert found.wants_to_grow(request(), ranks(2))
    assert found.goes_on_without([1]) is None  # the ranks save and end
    assert asked == [[1]]
    found.tethers.close()


@pytest.mark.parametrize(("copied", "steps", "held"), [(False, 0.0, True), (True, 0.0, False), (False, 1.0, False)])
def test_the_memory_of_the_ranks_before_is_freed(copied: bool, steps: float, held: bool) -> None:
    """Once all ranks have copies, or without copies have made a step; then peers can compute for lost ranks."""
    freed, order = list[bool](), Rerouting((0,), ("a",), "", "")
    before = Tether()
    found = Generation(
        range(2), num_more=0, grow_seconds=None, grown=False, before=(before,), variables={ENTRY: "x"}, first=1,
        lends=True, survives=bool, copied=lambda: freed.append(True), reroute=lambda _: order,
    )  # fmt: skip
    for tether in found.tethers.by_rank if copied else ():
        write_number(tether.memories.copies[0], SEAL, 5)
    for _ in range(2):
        found.wants_to_grow(request(), ranks(2, steps))
    assert freed == [True] * (not held)
    assert (found.inherited, found.environment) == ((list(before.memories.copies), {ENTRY: "x"}) if held else ([], {}))
    assert (found.goes_on_without([1]) is None) == held
    before.close()
    found.tethers.close()


def test_only_memory_that_has_the_newest_state_is_held(tmp_path: Path) -> None:
    """Rank 1 was killed in step 7 with a copy of step 4; its peer has copied the end of step 6."""
    found = generation(2)
    first, second = found.tethers.by_rank
    write_number(first.memories.copies[0], SEAL, 7)
    write_number(second.memories.copies[0], SEAL, 5)
    source, _ = newest(Source(), found, replace(job(pipeline=1, data=2), output_dir=str(tmp_path)), None)
    assert (source.step, source.tethers) == (6, (first,))
    found.tethers.close()


def test_ranks_go_on_from_the_newest_step_that_all_have_copied() -> None:
    tethers = Tethers(2)
    copies = [tether.memories.copies for tether in tethers.by_rank]
    assert common_step(copies) == -1
    for memory, step in zip((*copies[0], *copies[1]), (4, 6, 6, 8), strict=True):
        write_number(memory, SEAL, step + 1)
    assert common_step(copies) == 6
    assert common_step([(*copies[0], *copies[1])]) == 8  # either has the state of both
    tethers.close()
