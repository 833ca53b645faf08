"""Runs with an injected slow rank and an injected spike."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeloom.cli import main
from pipeloom.ir import Action, Op
from pipeloom.models.gpt import Block
from pipeloom.train.data.samples import Windows
from pipeloom.train.output.computing_seconds import CoreWaits, computing_seconds
from pipeloom.train.output.stragglers import StragglerWatch
from pipeloom.training import optimizer_step
from pipeloom.transport.shared_channel import SharedIncoming
from tests.cpu.train_runs import local, metrics, printed, started, text, words  # noqa: F401

SHORT = ("--eval_steps=0", "--sample_tokens=0", "--save_total_limit=null")
SLOW_FROM, DELAYED_FROM, SPIKE = 26, 10, 25


def slowed(rank: int, microbatches: int) -> None:
    """In process `rank`, every forward of a block sleeps 30 ms from a step on; undisturbed forwards take about 1 ms."""
    forward, calls = Block.forward, [0]

    def slow(self: Block, x: Any) -> Any:
        calls[0] += 1  # two blocks per stage
        if os.environ.get("RANK") == str(rank) and calls[0] > SLOW_FROM * 2 * microbatches:
            time.sleep(0.03)
        return forward(self, x)

    Block.forward = slow  # type: ignore[method-assign]


def delayed(rank: int, microbatches: int) -> None:
    """Every message to process `rank` takes 60 ms more from a step on."""
    receive, calls = SharedIncoming.receive, [0]

    def late(self: SharedIncoming) -> Any:
        message = receive(self)
        if os.environ.get("RANK") == str(rank) and message.tensors:
            calls[0] += 1
            if calls[0] > DELAYED_FROM * microbatches:
                time.sleep(0.06)
        return message

    SharedIncoming.receive = late  # type: ignore[method-assign]


def hindered(waiting: int, late: int, microbatches: int) -> None:
    """Process `waiting` gets its samples 60 ms later in every step, and messages to process `late` are `delayed`."""
    batch = Windows.batch

    def slow(self: Windows, *given: Any) -> Any:
        if os.environ.get("RANK") == str(waiting):
            time.sleep(0.06)
        return batch(self, *given)

    Windows.batch = slow  # type: ignore[method-assign]
    delayed(late, microbatches)


def test_a_slow_rank_is_named_on_a_loaded_machine() -> None:
    """Other processes take the core from 2 of 3 computations, for up to five times as long as these take."""
    draw, watch, named = random.Random(1), StragglerWatch(2), []
    for step in range(80):
        seconds = torch.zeros(2, 2, dtype=torch.float64)
        for rank in range(2):
            rows, now = list[tuple[Action, float, float]](), 0.0
            for number in range(16):
                length = 1.5 if step >= 50 and rank else 1.0
                length += draw.uniform(0.0, 5.0) * (draw.random() < 2 / 3)
                rows.append((Action(rank, Op.F if number < 8 else Op.B, number % 8), now, now := now + length))
            pipeline: Any = SimpleNamespace(waits={rank: {}}, processor_seconds={rank: {}}, threads={})
            seconds += computing_seconds(pipeline, [(rank, rows)], 2, rank, lambda _: 0.0)
        lines = watch.observe(seconds.tolist(), [0.0, 0.0], 50.0)
        named += [(step, *key) for key in lines]
    assert {(place, kind) for _, place, kind in named} == {(1, "forwards"), (1, "backwards")}
    assert all(50 < step < 70 for step, *_ in named)
    assert all(abs(float(found["factor"]) / 1.5 - 1) < 0.2 for found in watch.slow())


@pytest.mark.parametrize(
    ("core_waits", "seconds"), [(12.0, 4.0), (6.0, 10.0), (0.0, 16.0)], ids=["taken", "half", "sleeps"]
)
def test_a_rank_is_not_slow_where_it_waits_for_a_core(core_waits: float, seconds: float) -> None:
    """Four forwards of 4 s, of which each is on a core for 1 s; threads of the process waited for one so long."""
    rows = [(Action(0, Op.F, number), 5.0 * number, 5.0 * number + 4) for number in range(4)]
    on_core = {action: 1.0 for action, _, _ in rows}
    pipeline: Any = SimpleNamespace(waits={0: {}}, processor_seconds={0: on_core}, threads={})
    found = computing_seconds(pipeline, [(0, rows)], 2, 0, lambda _: core_waits)
    assert found[:, 0].tolist() == [seconds, 0.0]


def test_waits_for_a_core_count_in_their_own_step() -> None:
    """Threads waited for a core for 10 s in the first step; in the second one, the rank sleeps."""
    waited = iter([10.0, 0.0])
    found = []
    for on_core in (3.9, 1.0):
        rows = [(Action(0, Op.F, number), 5.0 * number, 5.0 * number + 4) for number in range(4)]
        on_cores = {0: {row[0]: on_core for row in rows}}
        pipeline: Any = SimpleNamespace(waits={0: {}}, processor_seconds=on_cores, threads={})
        found.append(float(computing_seconds(pipeline, [(0, rows)], 2, 0, lambda _: next(waited))[0, 0]))
    assert found == pytest.approx([15.6, 16.0])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not count waits for a core")
def test_waits_for_a_core_are_those_of_this_process() -> None:
    waits, own = CoreWaits(), [threading.get_native_id()]
    waits.seconds(own)
    time.sleep(0.2)
    assert waits.seconds(own) < 0.1  # a sleep is not one
    core = random.choice(sorted(os.sched_getaffinity(0)))
    command = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    allowed = os.sched_getaffinity(0)
    others = [subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for other in others:
            assert other.stdout is not None
            other.stdout.readline()
        os.sched_setaffinity(0, {core})
        waits.seconds(own)
        began, before = time.thread_time(), time.perf_counter()
        while time.thread_time() - began < 0.1:
            pass
        without_core = time.perf_counter() - before - (time.thread_time() - began)
        assert waits.seconds(own) == pytest.approx(without_core, rel=0.2)
        assert without_core > 0.05
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.communicate()


def test_only_threads_that_compute_wait_for_a_core(tmp_path: Path) -> None:
    """A background save waits 9 s, as a thread of gloo does; torch's worker 3 s, and the thread of the rank 1 s."""
    done = threading.Event()
    save = threading.Thread(target=done.wait)
    save.start()
    own, worker, gloo, late = threading.get_native_id(), 1 << 30, (1 << 30) + 1, (1 << 30) + 2
    names = {own: "python", worker: "python", gloo: "pt_gloo_runloop", save.native_id: "python", late: "python"}

    def waited(seconds: dict[int | None, int]) -> None:
        for thread, count in seconds.items():
            (tmp_path / str(thread)).mkdir(exist_ok=True)
            (tmp_path / str(thread) / "comm").write_text(names[thread] + "\n")
            (tmp_path / str(thread) / "schedstat").write_text(f"5 {count * 10**9} 7\n")

    waits, found = CoreWaits(tmp_path), []
    for seconds in (
        {own: 10, worker: 20, gloo: 30, save.native_id: 40},
        {own: 11, worker: 23, gloo: 39, save.native_id: 49, late: 60},
        {own: 13, worker: 23, gloo: 39, save.native_id: 49, late: 61},
    ):
        waited(seconds)
        found.append(waits.seconds([own]))
    done.set()
    save.join()
    assert found == [0.0, 3.0, 2.0]


def test_a_slow_link_and_a_wait_for_samples_are_named(text: Path, tmp_path: Path) -> None:  # noqa: F811
    out = tmp_path / "out"
    command = words(
        text, out, *SHORT, "--steps=23", "--save_steps=0", "--parallel.pipeline=2", "--batch.microbatches=2"
    )
    with started(command, first=partial(hindered, 0, 1, 2)) as process:
        assert process.wait() == 0, printed(process.stderr)
        shown = printed(process.stdout)
    told = [row["slow_links"] for row in metrics(out) if "slow_links" in row]
    assert told, shown
    (slow,) = (each for each in told[-1] if (each["source"], each["target"]) == (0, 1))
    assert slow["factor"] > 2
    assert slow["share"] > 0.1
    assert "  messages from rank " in shown
    waits = [row["sample_waits"] for row in metrics(out) if "sample_waits" in row]
    assert waits, shown
    assert all((each["replica"], each["rank"]) == (0, 0) for found in waits for each in found)
    assert all(0.07 < found[0]["share"] < 1 < found[0]["factor"] for found in waits)
    assert "  rank 0 waits for its samples during " in shown
    report = (out / "report.html").read_text()
    assert "<td>samples</td><td>rank 0</td>" in report
    assert "<td>link</td><td>rank 0 to rank 1</td>" in report
    assert not any(each["factor"] > 4 for row in metrics(out) for each in row.get("stragglers", ()))


def _name(straggler: dict[str, Any], *, of_replica: bool) -> str:
    return f"rank {straggler['rank']}" + (f" of replica {straggler['replica']}" if of_replica else "")


@pytest.mark.parametrize("more", [(), ("--parallel.data=2", "--batch.microbatches=2")], ids=["pipeline", "replicas"])
def test_a_slow_rank_is_named_in_the_terminal_and_in_the_metrics(
    text: Path,  # noqa: F811
    tmp_path: Path,
    more: tuple[str, ...],
) -> None:
    out = tmp_path / "out"
    command = words(text, out, *SHORT, "--steps=46", "--save_steps=0", "--parallel.pipeline=2", *more)
    with started(command, first=partial(slowed, 1, 2 if more else 4)) as process:
        assert process.wait() == 0, printed(process.stderr)
        shown = printed(process.stdout)
    told = [row["stragglers"] for row in metrics(out) if "stragglers" in row]
    (slow,) = (each for each in told[-1] if each["factor"] > 4)  # others may share the cores of this machine
    assert (slow["replica"], slow["rank"], slow["kind"]) == (0, 1, "forwards")
    assert 0.3 < slow["share"] <= 1  # of a step, which has little else
    assert (
        f"<td>computing: forwards</td><td>{_name(slow, of_replica=bool(more))}</td>"
        in (out / "report.html").read_text()
    )
    # The terminal gets one line a minute, so it names those that were found first.
    names = [_name(each, of_replica=bool(more)) for each in told[0]]
    assert any(re.search(rf"step \d+  .*{name}.* \d+\.\d times slower than", shown) for name in names), shown


def test_an_update_with_a_spike_is_left_out_on_all_ranks_and_replicas(
    monkeypatch: pytest.MonkeyPatch,
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    norms, calls = optimizer_step.gradient_norms, [0]

    def spiking(pipeline: Any) -> Any:
        calls[0] += 1
        return norms(pipeline) * (1000 if SPIKE * 4 - 3 <= calls[0] <= SPIKE * 4 else 1)

    monkeypatch.setattr(optimizer_step, "gradient_norms", spiking)
    out = tmp_path / "out"
    local(
        text, out, *SHORT, "--steps=27", "--save_steps=1", "--parallel.pipeline=2", "--parallel.data=2",
        "--batch.microbatches=2", "--on_spike=skip",
    )  # fmt: skip
    assert [row["step"] for row in metrics(out) if "spike" in row] == [SPIKE]
    assert f"step {SPIKE}  gradient norm " in (shown := capsys.readouterr().out)
    assert "; update left out" in shown
    before, at, after = (_tensors(out / f"checkpoint-{step}") for step in (SPIKE - 1, SPIKE, SPIKE + 1))
    assert before.keys() == at.keys()
    assert all(at[name].equal(value) for name, value in before.items())
    assert any(not after[name].equal(value) for name, value in at.items())


@pytest.mark.parametrize("more", ["--schedule=pipedream", "--optimizer.barrier=false"])
def test_updates_that_do_not_wait_for_the_norm_cannot_be_left_out(
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: str,
) -> None:
    assert main(words(text, tmp_path / "out", "--local", "--on_spike=skip", more)) == 2
    assert capsys.readouterr().err.startswith("pipeloom: error: on_spike=skip: does not work with")


def _tensors(checkpoint: Path) -> dict[str, Any]:
    """All tensors of a checkpoint: parameters and optimizer states."""
    files = sorted(checkpoint.rglob("*.safetensors"))
    return {f"{path.name} {name}": tensor for path in files for name, tensor in load_file(path).items()}
