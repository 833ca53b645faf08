"""Fault campaigns: faults are drawn at places that the run reaches, and differences are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeloom.chaos import attempt, campaign, leftovers
from pipeloom.chaos.campaign import Result, _speaker
from pipeloom.chaos.comparison import EQUAL, NOT_COMPARED, Outcome, compare
from pipeloom.chaos.draw import draw_faults
from pipeloom.chaos.fault import BY_ITSELF, ELASTIC, KINDS, RECOVERS, Fault, Order
from pipeloom.chaos.flip import flip_bit
from pipeloom.chaos.record import Record
from pipeloom.chaos.table import markdown, row, summary
from pipeloom.cli import main
from pipeloom.errors import InputError, RunError
from pipeloom.processes.launching.parents import adopting

SIZES = {"model-00001-of-00002.safetensors": 900, "manifest.json": 50}
SAVE = [
    "os.mkdir .checkpoint-3",
    "open model-00001-of-00002.safetensors",
    "open manifest.json",
    "os.rename checkpoint-3",
]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Two ranks, 38 steps of 10 actions, a checkpoint after each third step; rank 0 does all file operations."""
    rows: list[dict[str, Any]] = []
    for rank in range(2):
        files = 0
        for step in range(1, 39):
            base = {"rank": rank, "at": float(step), "files": files}
            rows.append({**base, "phase": f"step {step}", "actions": 10 * (step - 1), "steps": step - 1})
            if step % 3 == 0:
                rows.append({**base, "phase": f"checkpoint after step {step}", "actions": 10 * step, "steps": step})
                for text in SAVE if rank == 0 else ():
                    files += 1
                    rows.append({"rank": rank, "at": float(step), "file": text, "number": files})
        rows.append({"rank": rank, "at": 39.0, "files": files, "phase": "report", "actions": 380, "steps": 38})
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows) + '{"rank": 0, "ph')  # as a kill leaves it
    return Record(path)


def test_faults_are_drawn_where_they_have_a_place(record: Record) -> None:
    kinds = list(KINDS)
    faults = draw_faults(40 * len(kinds), 5, kinds, record, SIZES, torchrun=False)
    assert faults == draw_faults(40 * len(kinds), 5, kinds, record, SIZES, torchrun=False)
    assert faults != draw_faults(40 * len(kinds), 6, kinds, record, SIZES, torchrun=False)
    for kind in kinds:
        mine = [fault for fault in faults if fault.kind == kind]
        assert len(mine) == 40
        least = {"stop": 21, "loop": 21, "lock": 21, "slow": 121, "flip": 61, "late-flip": 61}.get(kind, 1)
        most = 48 if KINDS[kind].trigger == "file" else 190 if kind == "slow" else 380
        assert all(least <= fault.at <= most for fault in mine)
        assert {fault.rank for fault in mine} == ({0} if KINDS[kind].trigger == "file" else {0, 1})
    full = [fault for fault in faults if fault.kind == "full-disk"]
    assert {fault.at % 4 for fault in full} == {2, 3}  # files that are written
    assert all(0 < fault.limit_bytes < (900 if fault.at % 4 == 2 else 50) for fault in full)
    copied = {fault.options for fault in faults if fault.kind in RECOVERS}
    assert copied == {("--recover=true", f"--copy_steps={steps}") for steps in range(5)}
    elastic = {fault.options for fault in faults if fault.kind == ELASTIC}
    assert elastic == {("--elastic=true", f"--copy_steps={k}", "--regrow_seconds=0.5") for k in range(1, 5)}
    assert {fault.options for fault in faults if fault.kind not in BY_ITSELF} == {()}
    asked = [(fault.parent, fault.signal) for fault in faults if fault.kind == "preempt"]
    assert {number for parent, number in asked} == {10, 15}
    torchrun = draw_faults(40, 5, ["preempt"], record, SIZES, torchrun=True)
    assert {fault.signal for fault in torchrun if fault.parent} == {15}  # its agent ends at SIGUSR1


def test_hangs_strike_in_first_steps_and_evaluations_if_they_may_last_long(tmp_path: Path) -> None:
    rows = [
        ("setup", 0, 0),
        ("step 1", 10, 0),
        ("step 2", 20, 1),
        ("step 3", 30, 2),
        ("evaluation after step 3", 40, 3),
    ]
    rows += [("checkpoint after step 3", 50, 3), ("sample", 50, 3), ("report", 60, 3)]
    path = tmp_path / "record"
    path.write_text(
        "".join(
            json.dumps({"rank": 0, "at": 1.0, "phase": phase, "actions": actions, "files": 0, "steps": steps}) + "\n"
            for phase, actions, steps in rows
        )
    )

    def places(*, long_hangs: bool) -> set[int]:
        kinds = ["stop", "loop", "lock"]
        faults = draw_faults(600, 1, kinds, Record(path), SIZES, torchrun=False, long_hangs=long_hangs)
        return {fault.at for fault in faults}

    assert places(long_hangs=False) == {*range(31, 41)}
    assert places(long_hangs=True) == {*range(11, 51)}


def test_a_kind_without_a_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_text('{"rank": 0, "at": 1.0, "phase": "step 1", "actions": 0, "files": 0, "steps": 0}\n')
    with pytest.raises(InputError, match=r"--kinds flip: the run has no place for it .*save_steps"):
        draw_faults(1, 0, ["flip"], Record(path), SIZES, torchrun=False)


def test_an_interrupted_campaign_ends_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        assert leftovers.descendants() - before
        raise KeyboardInterrupt

    before = leftovers.descendants()
    monkeypatch.setattr(attempt, "_wait", interrupted)
    with adopting(), pytest.raises(KeyboardInterrupt):
        attempt.run_attempt(["sh", "-c", "sleep 50 & sleep 50"], Order("", None), tmp_path / "run", 60.0)
    assert not leftovers.descendants() - before


@pytest.mark.parametrize(("kind", "restarts"), [("kill", [3]), ("flip", [0, 3]), ("late-flip", [0, 3])])
def test_torchrun_starts_no_rank_again_before_a_bit_is_flipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, restarts: list[int]
) -> None:
    commands: list[Sequence[str]] = []

    def attempted(command: Sequence[str], order: Order, *_: object) -> attempt.Attempt:
        commands.append(command)
        code = int(len(commands) < len(restarts))
        return attempt.Attempt(code, 1.0, [], Record(Path(order.record)))

    (tmp_path / "fault-1").mkdir()
    monkeypatch.setattr(campaign, "run_attempt", attempted)
    campaign.Campaign(campaign.Job((), 2, "torchrun"), tmp_path)._hurt(1, Fault(kind=kind, rank=1, at=70))
    limits = [word for command in commands for word in command if word.startswith("--max-restarts=")]
    assert limits == [f"--max-restarts={number}" for number in restarts]


def test_a_late_flip_without_a_second_attempt_is_not_reached(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text('{"rank": 0, "at": 1.0, "struck": "action 1B0", "phase": "step 2"}\n')
    attempts = [attempt.Attempt(0, 2.0, [], Record(path))]
    found = campaign._result(1, Fault(kind="late-flip", rank=0, at=7), attempts, 1, None, [])
    assert (found.where, found.recovered) == (None, "not reached")


def test_processes_that_stay_are_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "_REST_SECONDS", 0.1)
    before = leftovers.descendants()
    command = ["sh", "-c", "touch $TMPDIR/forgotten; sleep 50 & echo started"]
    with adopting():
        found = attempt.run_attempt(command, Order(str(tmp_path / "record"), None), tmp_path / "run", 60.0)
    assert found.code == 0
    assert [line.text for line in found.lines] == ["started"]
    process, file = found.left
    assert process.startswith("process ")
    assert file == "temporary file forgotten"
    assert not leftovers.descendants() - before


def test_an_order_comes_back() -> None:
    order = Order("a.record", Fault(kind="slow", rank=1, at=7, times=2.5))
    assert Order.from_json(order.to_json()) == order
    assert Order.from_json(Order("a.record", None).to_json()).fault is None


@pytest.mark.parametrize("position", [0.0, 0.5, 0.999])
def test_one_bit_of_the_files_is_flipped(tmp_path: Path, position: float) -> None:
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100))
    (tmp_path / "manifest.json").write_bytes(bytes(100))
    told = flip_bit(tmp_path, position)
    number, byte = divmod(int(200 * position), 100)
    assert told == f"{names[number]}, byte {byte}"
    changed = {path.name: data for path in tmp_path.iterdir() if any(data := path.read_bytes())}
    assert list(changed) == [names[number]]
    assert [(at, value) for at, value in enumerate(changed[names[number]]) if value] == [(byte, 8)]


def test_what_differs_from_the_reference_run_is_told(tmp_path: Path) -> None:
    for name, losses in (("reference", [3.0, 2.0]), ("same", [3.0, 2.0]), ("other", [3.0, 2.5]), ("short", [3.0])):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "loss": loss, "step_seconds": id(loss)} for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    found = {
        name: compare(tmp_path / name, tmp_path / "reference").losses for name in ("same", "other", "short", "none")
    }
    assert found["same"] == EQUAL
    assert found["other"] == "differ from step 2"
    assert found["short"] == "1 rows instead of 2"
    assert found["none"] == "0 rows instead of 2"
    text = (tmp_path / "reference" / "metrics.jsonl").read_text()
    (tmp_path / "reference" / "metrics.jsonl").write_text(text + '{"step": 2, "eval_loss": 1.5}\n')
    assert compare(tmp_path / "same", tmp_path / "reference").losses == "2 rows instead of 3"
    assert compare(tmp_path / "same", tmp_path / "reference", may_miss_evaluation=True).losses == EQUAL
    reference = tmp_path / "reference"
    assert compare(tmp_path / "other", reference, tolerance=0.1).losses == "differ from step 2"
    assert compare(tmp_path / "same", reference, tolerance=0.1).losses == "2 rows instead of 3"
    (tmp_path / "same" / "metrics.jsonl").write_text(text + '{"step": 2, "eval_loss": 1.25}\n')
    assert compare(tmp_path / "same", reference, tolerance=0.1).losses == "differ from step 2"
    (tmp_path / "same" / "metrics.jsonl").write_text(text + '{"step": 2, "eval_loss": 1.49}\n')
    assert compare(tmp_path / "same", reference, tolerance=0.1).equal
    (tmp_path / "same" / "metrics.jsonl").write_text(text + '{"step": 2, "eval_loss": 1.25}\n')
    assert compare(tmp_path / "same", tmp_path / "reference", may_miss_evaluation=True).losses == "differ from step 2"


@pytest.mark.parametrize(
    ("line", "speaker"),
    [
        ("pipeloom: error: rank 1 was killed by SIGKILL in step 5; all ranks were ended", "launcher"),
        ("pipeloom: rank 1 in step 6, action 1RECV_F2: no progress for 5.0 s", "rank 1"),
        ("pipeloom: error: rank 0: rank 1 ended", "rank 0"),
        ("step 5  saved runs/checkpoint-5; pre-empted.", "rank 0"),
        ("pipeloom: no progress: rank 1 in step 1 for 30 s", "watchdog"),
        ("E1127 Signal 9 (SIGKILL) received by PID 7", "torchrun"),
    ],
)
def test_who_told_of_a_fault(line: str, speaker: str) -> None:
    assert _speaker(line) == speaker


def test_the_table_has_what_differs_and_what_is_left() -> None:
    fault = Fault(kind="kill", rank=1, at=7)
    equal, other = Outcome(*[EQUAL] * 4), Outcome(EQUAL, "model-00001 differ", EQUAL, EQUAL)
    known = (fault, "step 2, action 1B0", "launcher", 0.1, "a | line", 0.3, "resumed", 4.0, 2)
    results = [Result(1, *known, equal, ()), Result(2, *known, other, ()), Result(3, *known, equal, ("process 7",))]
    assert [result.good for result in results] == [True, False, False]
    alone = Result(1, replace(fault, kind=RECOVERS[0]), *known[1:], equal, ())  # but it was started twice
    assert (alone.good, replace(alone, attempts=1).good) == (False, True)
    assert row(results[0])[-2:] == ("yes", "nothing")
    close = Outcome(EQUAL, *[NOT_COMPARED] * 3)
    assert row(Result(1, *known, close, ()))[-2:] == ("within 0.1 %", "nothing")
    assert row(results[1])[-2:] == ("weights: model-00001 differ", "nothing")
    assert row(results[2])[-2:] == ("yes", "process 7")
    (line,) = summary(results)
    assert line == "kill: 1 of 3 bitwise, nothing left; noticed within 0.1 s (3); step again within 4.0 s (3)"
    slow = replace(fault, kind="slow", times=2.0)
    factors = [Result(1, slow, *known[1:], equal, (), named) for named in (1.7, 2.5, None)]
    assert summary(factors)[0].endswith("; 1 of 2 factors within 20% of the injected one")
    factors[1] = replace(factors[1], measured_factor=2.4)
    assert summary(factors)[0].endswith("injected one; 1 of 1 factors within 20% of the measured one")
    page = markdown("Fault campaign", ["seed 1"], results)
    assert (
        "| 3 | kill | 1 | step 2, action 1B0 | launcher | 0.10 s | 0.30 s | 4.00 s | resumed | yes | process 7 |"
        in page
    )
    assert "1. `a | line`" in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kinds=kil",), "'kil' is unknown: the kinds are kill, .*did you mean kill"),
        (("--kills=0",), "--kills=0: must be at least 1"),
        (("--kinds=elastic-kill", "--launcher=torchrun"), "torchrun starts as many ranks again. Use --launcher own"),
        (("--kills=1",), "local=true: a campaign injects faults into processes"),
        ((), "save_steps=100: a campaign needs at least 3 checkpoints in 200 steps"),
    ],
)
def test_campaigns_that_cannot_run_are_refused(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "job.yaml"
    config.write_text("steps: 200\n" if not words else "steps: 200\nsave_steps: 50\nlocal: true\n")
    assert main(["chaos", str(config), *words]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error


def test_a_campaign_whose_reference_run_fails_leaves_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command can be given again, once the configuration is mended."""
    (tmp_path / "job.yaml").write_text("steps: 3\nsave_steps: 1\n")
    monkeypatch.setattr(campaign, "run_attempt", lambda *_, **__: (_ for _ in ()).throw(RunError("no reference")))
    monkeypatch.chdir(tmp_path)
    assert main(["chaos", "job.yaml", "--kills", "1", "--out", "out"]) == 1
    assert not (tmp_path / "out").exists()


def test_the_rank_that_a_run_named_as_slow_comes_from_its_metrics(tmp_path: Path) -> None:
    slow = {"replica": 1, "rank": 2, "kind": "forwards", "factor": 2.5}
    rows: list[dict[str, Any]] = [
        {"step": 1},
        {"step": 2, "stragglers": [{**slow, "factor": 1.4}]},
        {"step": 3, "stragglers": [{**slow, "rank": 0, "factor": 9.5}, slow, {**slow, "kind": "backwards"}]},
        {"step": 4, "stragglers": [{**slow, "kind": "backwards", "factor": 9.0}, {**slow, "factor": 2.7}]},
    ]
    for count, named in ((1, None), (2, ("rank 2 of replica 1", 1.4)), (4, ("rank 2 of replica 1", 2.5))):
        (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:count]))
        assert campaign._named(tmp_path) == named


@pytest.mark.parametrize(
    ("others", "factor"),
    [
        (1.0, 3.0),
        (1.5, 2.0),  # the whole machine became slower
        (0.5, 3.0),  # beside a slow rank others wait, and have more of a core that they share
        (None, None),
    ],
)
def test_how_much_slower_a_rank_became_is_measured(tmp_path: Path, others: float | None, factor: float | None) -> None:
    rows: list[dict[str, Any]] = []
    for rank, growth in ((0, 3.0), (1, others)):
        for step in range(1, 21):
            seconds = {} if growth is None else {"forward_seconds": 0.01 * (growth if step > 11 else 1.0)}
            base = {"rank": rank, "at": float(step), "actions": 8 * step, "files": 0, "steps": step - 1}
            rows.append({**base, "phase": f"step {step}", **({"forward_seconds": 0.0} if seconds else {})})
            rows.append({**base, "at": step + 0.9, "phase": f"step {step}, update", **seconds})
    rows.append({"rank": 0, "at": 11.95, "struck": "action 0F0", "phase": "step 10"})
    path = tmp_path / "record"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert Record(path).slower() == (None if factor is None else pytest.approx(factor))
    path.write_text("".join(json.dumps(each) + "\n" for each in rows[:-1]))
    assert Record(path).slower() is None
