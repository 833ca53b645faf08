"""`pipeloom simulate` with costs files, memory limits and several schedules at once."""

from __future__ import annotations

import copy
import json
import random
import re
from itertools import product
from pathlib import Path

import pytest

from pipeloom import schedules
from pipeloom.ir import check
from pipeloom.ir.torch_csv import from_csv
from pipeloom.report.terminal import layout
from pipeloom.schedules import FAMILIES
from pipeloom.sim import Costs, simulate
from tests.pure.test_cli_simulate import KEYS, run

STAGE = {
    "forward": 0.5,
    "backward_input": 0.25,
    "backward_weight": 0.125,
    "activation_bytes": 1000,
    "weight_gradient_bytes": 400,
}


@pytest.fixture
def costs_file(tmp_path):
    def write(*, stages=4, **changes):
        data = {"stages": [dict(STAGE) for _ in range(stages)], "latency": 0.0, "memory_cap_bytes": None} | changes
        path = tmp_path / "costs.json"
        path.write_text(json.dumps(data))
        return str(path)

    return write


def answer_of(capsys, *words):
    code, out, err = run(capsys, "simulate", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_costs_files_give_times_links_and_bytes(capsys, costs_file):
    path = costs_file(latency=[[0.0, 0.5, 9, 9], [0.25, 0, 0, 9], [9, 0, 0, 0], [9, 9, 0, 0]])
    answer = answer_of(capsys, "1f1b", "--ranks", "4", "--microbatches", "1", "--costs", path)
    assert list(answer) == [*KEYS, "peak_bytes"]
    assert answer["makespan_seconds"] == 4 * 0.875 + 0.75
    assert answer["peak_bytes"] == [1000.0] * 4


def test_bytes_are_freed_by_i_and_by_w(capsys, costs_file):
    answer = answer_of(capsys, "zb-h1", "--ranks", "4", "--microbatches", "8", "--costs", costs_file())
    # rank d holds p-d whole activations and what d delayed W hold
    assert answer["peak_bytes"] == [(4 - d) * 1000.0 + d * 400.0 for d in range(4)]
    schedule = schedules.zb_h1(num_ranks=4, num_microbatches=8)
    costs = Costs(
        forward=1.0,
        backward_input=1.0,
        backward_weight=1.0,
        activation_bytes=(1000.0,) * 4,
        weight_gradient_bytes=(400.0,) * 4,
    )
    timeline = simulate(schedule, costs)
    assert list(timeline.peak_bytes) == answer["peak_bytes"]
    assert all(curve[-1][1] == 0.0 for curve in timeline.memory_bytes)
    assert timeline.memory_bytes[0][:4] == ((0.0, 0.0), (0.0, 1000.0), (1.0, 2000.0), (2.0, 3000.0))
    assert type(timeline).from_json(timeline.to_json()) == timeline
    assert simulate(schedule, Costs.uniform()).peak_bytes is None


def test_memory_in_rank_shares(capsys):
    words = ["--ranks", "4", "--microbatches", "12", "--memory-limit", "5", "--weight-gradient-memory", "0.5"]
    answer = answer_of(capsys, "zb-auto", *words)
    assert list(answer) == [*KEYS, "peak_memory", "within_memory"]
    assert max(answer["peak_memory"]) <= 5.0
    assert answer["within_memory"] is True
    answer = answer_of(capsys, "gpipe", *words)
    assert (answer["peak_memory"], answer["within_memory"]) == ([12.0] * 4, False)
    code, out, _ = run(capsys, "simulate", "gpipe", *words)
    assert code == 0
    assert (
        "gpipe: peak memory per rank 12 12 12 12 (activations of one rank for one micro-batch); over the limit" in out
    )


def test_search_says_what_it_beat_and_what_nobody_beats(capsys, costs_file):
    path = costs_file(memory_cap_bytes=[3000, 3000, 2500, 2000])
    words = ["--ranks", "4", "--microbatches", "6", "--costs", path]
    answer = answer_of(capsys, "search", *words, "--effort", "0.2")
    assert list(answer) == [*KEYS, "peak_bytes", "within_memory", "best_named", "lower_bound_seconds"]
    assert answer["within_memory"] is True
    assert answer["lower_bound_seconds"] <= answer["makespan_seconds"] <= answer["best_named"]["makespan_seconds"]
    named = answer_of(capsys, answer["best_named"]["name"], *words)
    assert named["makespan_seconds"] == pytest.approx(answer["best_named"]["makespan_seconds"])
    assert all(peak <= cap for peak, cap in zip(named["peak_bytes"], [3000, 3000, 2500, 2000], strict=True))
    code, out, _ = run(capsys, "simulate", "search", *words, "--effort", "0.2")
    assert code == 0
    assert "the best named schedule is" in out


def test_the_number_of_chunks_follows_the_file_and_the_placement_is_a_choice(capsys, costs_file):
    words = ["--ranks", "2", "--microbatches", "4", "--costs", costs_file()]
    assert answer_of(capsys, "interleaved", *words)["chunks"] == 2
    words += ["--effort", "0.2"]
    answer = answer_of(capsys, "search", *words, "--placement", "v")
    assert answer["chunks"] == 2
    assert answer["best_named"]["name"] in ("zb-v", "v-half", "v-min", "hanayo", "dualpipev")
    assert answer_of(capsys, "search", *words)["best_named"]["name"] in ("interleaved", "bfs")


def test_csv_reads_back(capsys, tmp_path):
    path = tmp_path / "orders.csv"
    code, out, _ = run(capsys, "simulate", "zb-v", "--ranks", "2", "--microbatches", "4", "--csv", str(path))
    assert code == 0
    assert f"wrote {path}" in out
    schedule = from_csv(path.read_text(), name="zb-v")
    assert schedule == schedules.zb_v(num_ranks=2, num_microbatches=4)
    check(schedule)


def test_bandwidths_and_shared_links_of_the_costs_file(capsys, costs_file):
    path = costs_file(stages=2, links=[{"ranks": [[0, 1], [1, 0]], "bytes_per_second": 200}], latency=0.25)
    data = json.loads(Path(path).read_text())
    for stage in data["stages"]:
        stage |= {"message_bytes": 100, "gradient_message_bytes": 50}
    Path(path).write_text(json.dumps(data))
    words = ["1f1b", "--ranks", "2", "--microbatches", "1", "--costs", path]
    # 0F 0.5, message 0.5, latency 0.25, 1F 0.5, 1B 0.375, message 0.25, latency 0.25, 0B 0.375
    assert answer_of(capsys, *words)["makespan_seconds"] == 3.0
    data |= {"links": [], "bytes_per_second": 100, "overlap_communication": False}
    Path(path).write_text(json.dumps(data))
    assert answer_of(capsys, *words)["makespan_seconds"] == 3.75
    assert answer_of(capsys, *words, "--slow-rank", "1:2")["makespan_seconds"] == 3.75 + 0.875


def test_orders_made_to_measure_count_a_message_with_its_bytes(capsys, costs_file, tmp_path):
    """A second of latency, a second on its link, or half a second of each: the same order."""
    pairs = [[a, b] for a in range(4) for b in range(4) if abs(a - b) == 1]
    links = [{"ranks": [pair], "bytes_per_second": 100} for pair in pairs]
    orders = []
    for changes in (
        {"latency": 1.0},
        {"bytes_per_second": 100},
        {"latency": 0.5, "bytes_per_second": 200},
        {"bytes_per_second": 1, "links": links},
        {},
    ):
        path = Path(costs_file(**changes))
        data = json.loads(path.read_text())
        for stage in data["stages"]:
            stage["message_bytes"] = 100
        path.write_text(json.dumps(data))
        csv = tmp_path / "orders.csv"
        words = ["simulate", "zb-auto", "--ranks", "4", "--microbatches", "6", "--costs", str(path), "--csv", str(csv)]
        assert run(capsys, *words)[0] == 0
        orders.append(csv.read_text())
    assert len(set(orders[:4])) == 1
    assert orders[4] != orders[0]


def test_search_knows_of_links_that_are_shared_or_block_and_of_overlapped_units(capsys, costs_file):
    """Under the very same costs it is never above a named schedule, and its bound never above any."""
    rng = random.Random(7)
    pairs = [[0, 1], [1, 0], [1, 2], [2, 1]]
    differed = 0
    for placement, names in (
        ("loop", "naive gpipe 1f1b dapple-pb zb-h1 zb-h2 zb-auto"),
        ("v", "zb-v v-half dualpipev"),
    ):
        for blocking, limits in product(
            (False, True), ({"links": [{"ranks": pairs, "bytes_per_second": 60}]}, {"bytes_per_second": 40})
        ):
            path = Path(
                costs_file(stages=3 if placement == "loop" else 6, overlap_communication=not blocking, **limits)
            )
            data = json.loads(path.read_text())
            for stage in data["stages"]:
                stage |= {what: rng.uniform(0.1, 1) for what in ("forward", "backward_input", "backward_weight")}
                stage |= {"message_bytes": rng.choice([0, 20, 60]), "gradient_message_bytes": rng.choice([0, 30])}
            path.write_text(json.dumps(data))
            words = ["--ranks", "3", "--microbatches", "6", "--costs", str(path), "--overlap", "0.7"]
            found = answer_of(capsys, "search", *words, "--effort", "0.05", "--placement", placement)
            named = {name: answer_of(capsys, name, *words)["makespan_seconds"] for name in names.split()}
            assert found["lower_bound_seconds"] <= min(found["makespan_seconds"], *named.values())
            best = found["best_named"]
            assert found["makespan_seconds"] <= best["makespan_seconds"] <= min(named.values())
            assert named.get(best["name"], best["makespan_seconds"]) == best["makespan_seconds"]
            differed += found["makespan_seconds"] < best["makespan_seconds"]
    assert differed


def test_a_v_has_two_chunks_unless_they_are_counted(capsys):
    words = ["search", "--ranks", "2", "--microbatches", "2", "--placement", "v", "--effort", "0.1"]
    assert answer_of(capsys, *words)["chunks"] == 2
    assert answer_of(capsys, *words, "--chunks", "4")["chunks"] == 4


def test_memory_is_summed_without_noise(capsys):
    words = ["bfs", "--ranks", "2", "--chunks", "3", "--microbatches", "6", "--memory-limit", "9"]
    assert answer_of(capsys, *words)["peak_memory"] == [6.0, 6.0]


def test_numbers_are_finite_or_refused(capsys):
    words = ["1f1b", "--ranks", "4", "--microbatches", "8", "--forward", "1e100", "--slow-rank", "1:1e100"]
    assert answer_of(capsys, *words)["makespan_seconds"] > 1e200
    code, out, err = run(capsys, "simulate", "1f1b", "--ranks", "4", "--microbatches", "8", "--forward", "1e308")
    assert (code, out) == (2, "")
    assert "forward=1e+308: must be a number of seconds from 0 to 1e+100" in err


@pytest.mark.parametrize("name", FAMILIES)
def test_a_slow_rank_takes_longer_for_all_that_it_computes(capsys, costs_file, name):
    words = ["--ranks", "2", "--microbatches", "4"]
    for more in ([], ["--costs", costs_file(stages=4 if FAMILIES[name].default_chunks == 2 else 2)]):
        if more and name in ("dualpipe", "chimera"):
            more[1] = costs_file(stages=2)
        before = answer_of(capsys, name, *words, *more)
        after = answer_of(capsys, name, *words, *more, "--slow-rank", "1:1.5", "--slow-rank", "0:1")
        assert after["ideal_seconds"] == pytest.approx(before["ideal_seconds"] * 1.25)
        assert after["makespan_seconds"] >= after["span_seconds"] > before["ideal_seconds"] * 1.49
        assert list(after) == list(before)


def test_slow_ranks_are_compared(capsys):
    words = ["compare", "gpipe", "naive", "--ranks", "2", "--microbatches", "2", "--slow-rank", "1:2"]
    assert [each["makespan_seconds"] for each in answer_of(capsys, *words)["schedules"]] == [15.0, 18.0]


def test_several_schedules_in_one_table_and_one_picture(capsys, tmp_path):
    words = ["compare", "1f1b", "zb-v", "gpipe", "--ranks", "3", "--microbatches", "5"]
    code, out, err = run(
        capsys, "simulate", *words, "--svg", str(tmp_path / "a.svg"), "--html", str(tmp_path / "a.html")
    )
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line for line in lines if line in ("1f1b", "zb-v", "gpipe")] == ["1f1b", "zb-v", "gpipe"]
    assert sum(line.startswith("rank ") for line in lines) == 9
    table = [line.split()[0] for line in lines if "%" in line]
    assert table[0] == "zb-v"
    assert sorted(table) == ["1f1b", "gpipe", "zb-v"]
    assert (tmp_path / "a.svg").read_text().count('class="title"') == 3
    assert "zb-v, simulated" in (tmp_path / "a.html").read_text()
    answer = answer_of(capsys, *words)
    assert [each["schedule"] for each in answer["schedules"]] == ["1f1b", "zb-v", "gpipe"]
    assert list(answer["schedules"][0]) == KEYS


def test_all_schedules_can_be_compared(capsys):
    code, out, err = run(
        capsys, "simulate", "compare", *FAMILIES, "--ranks", "4", "--microbatches", "8", "--effort", "0.1"
    )
    assert (code, err) == (0, "")
    for name in FAMILIES:
        assert sum(line.split()[:1] == [name] for line in out.splitlines()) == 2  # above its picture, and in the table


def test_timelines_that_are_compared_have_one_scale():
    timelines = [
        simulate(schedules.build(name, num_ranks=2, num_microbatches=4), Costs.uniform()) for name in ("naive", "gpipe")
    ]
    for columns in (40, 80, 400):
        ends = []
        for timeline in timelines:
            rows, _ = layout(timeline, columns, letters=True, others=timelines)
            ends.append(max(len("".join(text for text, _ in row).rstrip(" .")) for row in rows))
        assert ends[0] / ends[1] == pytest.approx(timelines[0].makespan / timelines[1].makespan, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare"], "needs at least one schedule. Name the schedules to compare"),
        (["compare", "1f1b", "gpip"], "Did you mean 'gpipe'?"),
        (["compare", "1f1b", "--csv", "x.csv"], "--trace, --csv and --out write one schedule. Remove compare"),
        (["1f1b", "gpipe"], "run `pipeloom simulate compare 1f1b gpipe`"),
        (["1f1b", "--memory-limit", "0"], "--memory-limit 0"),
        (["1f1b", "--weight-gradient-memory", "1.5"], "--weight-gradient-memory 1.5"),
        (["zb-auto", "--memory-limit", "0.5"], "Raise the cap"),
        (["search", "--memory-limit", "0.5"], "Raise the cap"),
        (["search", "--effort", "0"], "--effort 0: must be more than 0"),
        (["search", "--prove", "-1"], "--prove -1: must be more than 0"),
        (
            ["search", "--microbatches", "100000"],
            "this schedule has at most 20,000. Use smaller sizes",
        ),
        (["1f1b", "--overlap", "-1"], "overlap=-1.0: must be a fraction of the sum of F and B, >= 0"),
        (["1f1b", "--effort", "1"], "--effort has no effect without schedule `search`"),
        (["compare", "1f1b", "zb-v", "--placement", "v"], "--placement has no effect without schedule `search`"),
        (["1f1b", "--prove", "1"], "--prove has no effect without schedule `search`"),
        (["1f1b", "--trace", "x.txt"], "--trace x.txt: the file name must end in .json"),
        (["1f1b", "--html", "x", "--svg", "x"], "x is named twice: the second file would overwrite the first"),
        (["1f1b", "--costs", "nowhere.json"], "--costs nowhere.json: No such file"),
        (["1f1b", "--placement", "ring"], "placement"),
        (["1f1b", "--slow-rank", "2:1.5"], "--slow-rank 2:1.5: ranks are 0..1"),
        (["1f1b", "--slow-rank", "1"], "--slow-rank 1: must be RANK:FACTOR"),
        (["1f1b", "--slow-rank", "1:0"], "--slow-rank 1:0: must be RANK:FACTOR"),
        (["1f1b", "--slow-rank", "1:-2"], "--slow-rank 1:-2: must be RANK:FACTOR"),
        (["1f1b", "--slow-rank", "1:nan"], "--slow-rank 1:nan: must be RANK:FACTOR"),
        (["1f1b", "--slow-rank", "1:1e999"], "--slow-rank 1:1e999: must be RANK:FACTOR"),
        (["1f1b", "--slow-rank", "-1:2"], "slow-rank"),
        (["1f1b", "--slow-rank", "1:2", "--slow-rank", "1:3"], "rank 1 already has a factor"),
        (["dualpipe", "--microbatches", "3"], "Use 4"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    sizes = ["--ranks", "2"] + ([] if "--microbatches" in words else ["--microbatches", "4"])
    code, out, err = run(capsys, "simulate", *words, *sizes)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def sized(data):
    for stage in data["stages"]:
        stage["message_bytes"] = 10
    return data


def link(pair, bandwidth=5):
    return {"ranks": [pair], "bytes_per_second": bandwidth}


def broken(change):
    data = {"stages": [copy.deepcopy(STAGE) for _ in range(2)], "latency": 0.0, "memory_cap_bytes": [1e6, 1e6]}
    change(data)
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("stages"), "the costs file: missing key 'stages'"),
        (lambda d: d.update(stages=[]), "the costs file: stages=[]: must have an entry per stage"),
        (lambda d: d.update(memory=3), "the costs file: unknown key 'memory'"),
        (lambda d: d["stages"][1].pop("forward"), "the costs file: stages[1]: missing key 'forward'"),
        (
            lambda d: d["stages"][1].pop("activation_bytes"),
            "the costs file: key 'activation_bytes' is in only one of stages[0] and stages[1]: all stages need",
        ),
        (lambda d: d["stages"][0].update(forward="1"), "the costs file: stages[0].forward='1'"),
        (lambda d: d["stages"][0].update(forward=True), "the costs file: stages[0].forward=True"),
        (lambda d: d["stages"][0].update(forward=-1), "the costs file: stages[0].forward=-1"),
        (
            lambda d: d["stages"][0].update(backward_input=float("nan")),
            "the costs file: stages[0].backward_input=nan",
        ),
        (lambda d: d["stages"][0].update(weight_gradient_bytes=2000), "2000 weight_gradient_bytes of 1000"),
        (lambda d: d["stages"].append(5), "the costs file: stages[2]=5: must be an object with keys"),
        (lambda d: d["stages"].append(dict(STAGE)), "has 3 stages, but schedule '1f1b' has 2 on 2 ranks"),
        (lambda d: d.update(latency="fast"), "the costs file: latency='fast'"),
        (lambda d: d.update(latency=[1, 2]), "the costs file: latency[0]=1: must be a list"),
        (lambda d: d.update(latency=[[0, 1], [1, -1]]), "the costs file: latency[1][1]=-1"),
        (lambda d: d.update(latency=[[0, 1, 2]] * 3), "2 ranks need a 2 x 2 table"),
        (lambda d: d.update(memory_cap_bytes=5), "the costs file: memory_cap_bytes=5: must be a list"),
        (lambda d: d.update(links=5), "the costs file: links=5: must be a list"),
        (lambda d: d.update(bytes_per_second=5), "no message_bytes. Add message_bytes per stage"),
        (lambda d: d.update(overlap_communication=1), "the costs file: overlap_communication=1"),
        (
            lambda d: d["stages"][0].update(message_bytes=1),
            "the costs file: key 'message_bytes' is in only one of stages[0] and stages[1]",
        ),
        (
            lambda d: sized(d).update(links=[{"ranks": [[0, 1]]}]),
            "the costs file: links[0]: missing key 'bytes_per_second'",
        ),
        (
            lambda d: sized(d).update(links=[link([0, 1, 2])]),
            "the costs file: links[0].ranks[0]=[0, 1, 2]: must be a list of length 2",
        ),
        (
            lambda d: sized(d).update(links=[link([0, True])]),
            "the costs file: links[0].ranks[0][1]=True: must be an integer",
        ),
        (lambda d: sized(d).update(links=[link([0, 7])]), "link 0 joins ranks (0, 7): ranks must be in 0..1"),
        (lambda d: sized(d).update(links=[link([0, 1]), link([0, 1])]), "ranks (0, 1) are in two links"),
        (lambda d: sized(d).update(links=[link([0, 1], 0)]), "bytes_per_second=0.0: must be finite and > 0"),
        (lambda d: sized(d).update(bytes_per_second="fast"), "the costs file: bytes_per_second='fast'"),
        (lambda d: d.update(memory_cap_bytes=[5]), "memory_cap_bytes has 1 entries for 2 ranks"),
        (lambda d: d.update(memory_cap_bytes=[5, None]), "the costs file: memory_cap_bytes[1]=None"),
    ],
)
def test_broken_costs_files_are_refused_in_one_line(capsys, tmp_path, change, message):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(broken(change)))
    code, out, err = run(capsys, "simulate", "1f1b", "--ranks", "2", "--microbatches", "2", "--costs", str(path))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "costs.json: the costs file is not valid JSON (it is nested too deep)"),
        ('{"stages": [{"forward": 1, "forward": 2}]}', "duplicate key 'forward' in one object"),
        (json.dumps({"stages": [STAGE | {"forward": 10**400}]}), "the costs file: stages[0].forward=inf"),
        (json.dumps({"stages": [STAGE | {"forward": 1e101}]}), "forward=1e+101: must be a number of seconds"),
        (json.dumps({"stages": [STAGE] * 3}), "has 3 stages, but schedule 'search' has 2 on 2 ranks"),
    ],
)
def test_odd_json_is_refused_in_one_line(capsys, tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    code, out, err = run(capsys, "simulate", "search", "--ranks", "2", "--microbatches", "2", "--costs", str(path))
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_stages_of_the_file_fit_all_that_are_compared_and_a_byte_order_mark_is_no_matter(capsys, costs_file):
    path = Path(costs_file())
    path.write_text(path.read_text(), encoding="utf-8-sig")
    words = ["--ranks", "4", "--microbatches", "2", "--costs", str(path)]
    code, _, err = run(capsys, "simulate", "compare", "1f1b", "zb-v", *words)
    assert code == 2
    assert "has 4 stages, but schedule 'zb-v' has 8 on 4 ranks. Give one entry per stage. Compare schedules with" in err


def test_what_the_file_says_is_not_said_twice(capsys, costs_file, tmp_path):
    path = costs_file()
    for words in (["--forward", "1"], ["--latency", "0"], ["--weight-gradient-memory", "0.5"]):
        code, _, err = run(capsys, "simulate", "1f1b", "--ranks", "4", "--microbatches", "2", "--costs", path, *words)
        assert code == 2
        assert re.search(rf"{words[0]}.*: does not work with --costs.*Remove", err)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    code, _, err = run(
        capsys, "simulate", "1f1b", "--ranks", "4", "--microbatches", "2", "--costs", str(tmp_path / "binary.json")
    )
    assert code == 2
    assert "not a text file" in err
