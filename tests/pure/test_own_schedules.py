"""Schedules that somebody brings along: from Python, from files, on the command line; refused in one line."""

from __future__ import annotations

import json

import pytest

from pipeloom import Action, Op, schedules
from pipeloom.cli import main
from pipeloom.errors import ScheduleError
from pipeloom.ir.text import format_orders, to_json
from pipeloom.ir.torch_csv import from_csv, to_csv
from pipeloom.passes import lower

ONE_F_ONE_B = schedules.one_f_one_b(num_ranks=2, num_microbatches=3)
SIZES = {"num_ranks": 2, "num_microbatches": 3}
SOURCE = """
from pipeloom import schedules
__all__ = []
def mine(*, num_ranks, num_microbatches):
    return schedules.one_f_one_b(num_ranks=num_ranks, num_microbatches=num_microbatches).orders
def chunked(num_ranks, num_microbatches, num_chunks=2):
    return schedules.build("bfs", num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
def fixed(num_ranks, num_microbatches):
    return "0F0 0B0\\n1F0 1B0"
def raises(num_ranks, num_microbatches):
    return 1 / 0
def waits(num_ranks, num_microbatches):
    return ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1B1 1F1 1F2 1B0 1B2"]
def nothing(num_ranks, num_microbatches):
    return None
def other(ranks):
    return ""
NUMBER = 3
"""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    return str(file)


@pytest.mark.parametrize(
    "orders",
    [
        ONE_F_ONE_B.orders,
        format_orders(ONE_F_ONE_B.orders),
        format_orders(ONE_F_ONE_B.orders).splitlines(),
        [list(map(str, order)) for order in ONE_F_ONE_B.orders],
    ],
)
def test_orders_of_every_form(orders):
    schedule = schedules.from_orders(orders, name="mine")
    assert (schedule.orders, schedule.placement, schedule.name) == (ONE_F_ONE_B.orders, ONE_F_ONE_B.placement, "mine")


@pytest.mark.parametrize("name", [name for name in schedules.SYNCHRONOUS if name != "search"])
def test_orders_say_it_all_but_the_overlapped_pairs(name):
    schedule = schedules.build(name, num_ranks=4, num_microbatches=8)
    assert schedules.from_orders(schedule.orders, name=name, overlapped=schedule.overlapped) == schedule


def test_a_function():
    def mine(num_ranks, num_microbatches):
        return schedules.gpipe(num_ranks=num_ranks, num_microbatches=num_microbatches).orders

    schedule = schedules.from_function(mine, num_ranks=3, num_microbatches=2)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches) == ("mine", 3, 2)
    assert schedules.from_function(schedules.gpipe, num_ranks=3, num_microbatches=2).name == "gpipe"


def test_files(tmp_path, path):
    (tmp_path / "own.csv").write_text(to_csv(ONE_F_ONE_B))
    (tmp_path / "lowered.csv").write_text(to_csv(lower(ONE_F_ONE_B)))
    (tmp_path / "own.json").write_text(to_json(ONE_F_ONE_B))
    for source in (f"{tmp_path}/own.csv", f"{tmp_path}/lowered.csv", f"{tmp_path}/own.json", f"{path}:mine"):
        assert schedules.build(source, **SIZES).orders == ONE_F_ONE_B.orders
    assert schedules.build(f"{path}:chunked", **SIZES, num_chunks=3).placement.num_chunks == 3


REFUSED = {
    "missing.csv": r"schedule .*missing.csv: No such file or directory. Name a readable file",
    "mine.py": r"mine.py' names no function. Write .*mine.py:NAME",
    "mine.py:absent": r"has no function 'absent'. Write .*mine.py:NAME",
    "mine.py:NUMBER": r"has no function 'NUMBER'",
    "mine.py:other": r"function 'other' cannot be called with num_ranks, num_microbatches \(missing .* 'ranks'\)",
    "mine.py:raises": r"function 'raises' raised ZeroDivisionError: division by zero. Fix it for 2 ranks and 3",
    "mine.py:waits": r"schedule 'waits' deadlocks",
    "mine.py:nothing": r"orders of schedule 'nothing' are not rows of actions",
    "mine.py:fixed": r"function 'fixed' is for 1 micro-batches, the run has 3: they must be equal. Use 1",
    "broken.py:f": r"schedule file .*broken.py cannot be imported \(SyntaxError",
    "bad.csv": r"'zero': an action is stage, op",
    "bad.json": r"bad.json: the schedule: missing keys 'name', 'num_microbatches', ",
}


@pytest.mark.parametrize("source", REFUSED)
def test_refusals(source, tmp_path, path, capsys):
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "bad.csv").write_text("0F0,zero\n")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ScheduleError, match=REFUSED[source]) as caught:
        schedules.build(f"{tmp_path}/{source}", **SIZES)
    assert "\n" not in str(caught.value)
    assert main(["simulate", f"{tmp_path}/{source}", "--ranks", "2", "--microbatches", "3"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_orders_of_nothing_are_refused():
    for orders in ("", [], [[1]], "0B0"):
        with pytest.raises(ScheduleError):
            schedules.from_orders(orders)


def test_simulate_takes_files(tmp_path, path, capsys):
    arguments = ["--ranks", "2", "--microbatches", "3", "--json"]
    assert main(["simulate", "1f1b", *arguments]) == 0
    expected = json.loads(capsys.readouterr().out) | {"schedule": "mine"}
    assert main(["simulate", f"{path}:mine", *arguments]) == 0
    assert json.loads(capsys.readouterr().out) == expected
    assert main(["simulate", "compare", f"{path}:mine", "gpipe", *arguments]) == 0
    assert [row["schedule"] for row in json.loads(capsys.readouterr().out)["schedules"]] == ["mine", "gpipe"]


def test_a_csv_for_torch_of_a_schedule_with_replicas_is_refused_in_one_line(tmp_path, capsys):
    csv = str(tmp_path / "out.csv")
    assert main(["simulate", "dualpipe", "--ranks", "2", "--microbatches", "4", "--csv", csv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "holds stage 0 on ranks (0, 1): torch.distributed.pipelining needs one rank per stage. Write JSON" in line


def test_overlapped_units_travel_in_a_csv():
    schedule = schedules.dualpipev(num_ranks=2, num_microbatches=5)
    for text in (to_csv(schedule), to_csv(lower(schedule))):
        assert "(0F3;3B1)OVERLAP_F_B" in text
        assert from_csv(text, name="dualpipev") == schedule
    assert from_csv("(0F0;0B0)OVERLAP_F_B,0REDUCE_GRAD\r\n").overlapped == {(Action(0, Op.F, 0), Action(0, Op.B, 0))}


def test_the_lowered_form_for_torch():
    assert to_csv(lower(schedules.gpipe(num_ranks=2, num_microbatches=1))) == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD\n"
    )


def test_files_as_they_come_or_are_refused_in_one_line(tmp_path, capsys):
    def simulated(name, text, function="", **options):
        (tmp_path / name).write_text(text, **options)
        code = main(["simulate", f"{tmp_path / name}{function}", "--ranks", "2", "--microbatches", "3"])
        out, err = capsys.readouterr()
        assert (code, len(err.splitlines())) in ((0, 0), (2, 1))
        return err if code else out

    orders = "\n".join(",".join(map(str, order)) for order in ONE_F_ONE_B.orders)
    whole = to_json(ONE_F_ONE_B)
    assert "rank 1" in simulated("mark.csv", orders, encoding="utf-8-sig")
    assert "rank 1" in simulated("mark.json", whole, encoding="utf-8-sig")
    assert "forwards only" in simulated("forward.csv", "0F0,0F1,0F2\n1F0,1F1,1F2\n")
    assert "has no forwards" in simulated("empty.csv", "")
    assert "an action is stage, op" in simulated("long.csv", "0F" + "1" * 5000)
    assert "nested too deep" in simulated("deep.json", "[" * 100_000)
    assert "duplicate key 'name'" in simulated("twice.json", whole.replace("{", '{"name": "other",', 1))
    huge = whole.replace(": 3", ": 1" + "0" * 400, 1)
    assert "the schedule: num_microbatches=inf" in simulated("huge.json", huge)
    ends = "def ends(num_ranks, num_microbatches):\n    raise SystemExit(0)\n"
    assert "raised SystemExit" in simulated("ends.py", ends, ":ends")
    assert "cannot be imported (SystemExit" in simulated("quits.py", "raise SystemExit(0)", ":ends")
