"""`pipeloom partition` as scripts and people call it, with a profile."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeloom.cli import main
from pipeloom.cli.common.planning import stream_command
from pipeloom.cli.train import parse
from pipeloom.errors import InputError
from pipeloom.plan.plan import Plan
from pipeloom.train.config.rules.settings import validate_settings

KEYS = ("name", "forward_seconds", "backward_seconds", "activation_bytes", "parameter_bytes")
# A front that computes, and a tail with the weights.
ROWS = [("a", 1.0, 2.0, 200, 10), ("b", 1.0, 2.0, 200, 10), ("c", 1.0, 2.0, 10, 10), ("d", 0.1, 0.2, 10, 1000)]
LAYERS = [dict(zip(KEYS, row, strict=True)) for row in ROWS]


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": LAYERS}))
    return str(path)


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["partition", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_numbers_as_json(capsys, profile):
    words = ["--profile", profile, "--ranks", "4", "--bandwidth", "100", "--json"]
    for form, period in (("summed", 3.0 + 4 * 2 * 30 / 3 / 100 / 3), ("published", 3.0)):
        code, out, err = run(capsys, *words, "--form", form)
        assert (code, err) == (0, "")
        answer = json.loads(out)
        assert answer["stages"] == [{"layers": [0, 2], "replicas": 3}, {"layers": [3, 3], "replicas": 1}]
        assert answer["period_seconds"] == pytest.approx(period)
        assert answer["bottleneck"] == {"kind": "compute", "stage": 0}
        assert answer["in_flight"] == [2, 1]
        assert answer["memory_bytes"] == [2 * (30 + 410), 1010]
        together = (9.3, 4 * 3 * 1030 / 4 / 100)
        expected = sum(together) / 4 if form == "summed" else max(together) / 4
        assert answer["data_parallel_seconds"] == pytest.approx(expected)
        assert answer["straight_pipeline_seconds"] == pytest.approx(4.0)
    assert json.loads(run(capsys, *words)[1])["form"] == "summed"


def test_levels(capsys, profile):
    code, out, _ = run(capsys, "--profile", profile, "--levels", "3@1e3,2@100", "--json")
    answer = json.loads(out)
    assert code == 0
    assert sum(stage["replicas"] for stage in answer["stages"]) == 6
    assert [inner * outer for inner, outer in answer["replicas_by_level"]] == [s["replicas"] for s in answer["stages"]]
    for form in ("summed", "published"):
        rest = ["--form", form, "--json"]
        flat = json.loads(run(capsys, "--profile", profile, "--ranks", "4", "--bandwidth", "100", *rest)[1])
        for levels in ("4@100", "4@100,1@1", "1@1,4@100"):
            assert json.loads(run(capsys, "--profile", profile, "--levels", levels, *rest)[1]) == flat


def test_why(capsys, profile):
    _, out, _ = run(capsys, "--profile", profile, "--ranks", "4", "--bandwidth", "100")
    first, header, *stages, together, straight, python, train = out.splitlines()
    assert first.startswith(
        "3.267 s per minibatch, 2 stages on 4 ranks; bottleneck: compute of stage 0, 3 s (plus sync"
    )
    assert header.split()[:3] == ["stage", "layers", "replicas"]
    assert [line.split()[:2] for line in stages] == [["0", "0-2"], ["1", "3-3"]]
    assert "data parallelism alone takes 10.05 s, 3.08x as long; bottleneck: sync" in together
    assert "one stage per rank takes 4 s, 1.22x as long; bottleneck: transfer from stage 0 to 1" in straight
    assert python == (
        "train it in Python: pl.Pipeline(model, pl.schedules.pipedream(num_ranks=4, num_microbatches=9, "
        "replicas=[3, 1]), cut=[3, 1])"
    )
    assert train == (
        "train a GPT of pipeloom: pipeloom train --schedule pipedream --parallel.pipeline 2 --parallel.replicas 3,1 "
        "--steps 201 --eval_steps 51 --save_steps 102"
    )
    _, out, _ = run(capsys, "--profile", profile, "--ranks", "8", "--bandwidth", "1")
    assert "one stage per rank is not possible (4 layers for 8 ranks)" in out
    assert "alone would take" in out
    _, out, _ = run(capsys, "--profile", profile, "--ranks", "4", "--bandwidth", "100", "--memory-cap", "1100")
    assert "data parallelism alone exceeds the memory cap" in out


def gpt_1_3_1(work: float = 9.0) -> list[dict[str, object]]:
    """Stages of 1, 3 and 1 ranks have 3 s of work for each rank; the weights at both ends forbid copies."""
    rows = [("embedding", 0, 0, 0, 0), ("blocks.0", 1, 2, 0, 1e9), ("blocks.1", work / 3, 2 * work / 3, 0, 0)]
    rows += [("blocks.2", 1, 2, 0, 1e9), ("norm", 0, 0, 0, 0), ("head", 0, 0, 0, 0)]
    return [dict(zip(KEYS, row, strict=True)) for row in rows]


def test_more_in_flight_than_noam_is_said_and_the_command_trains_the_cut(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps({"layers": gpt_1_3_1()}).encode())  # an editor's byte order mark
    words = ["--profile", str(path), "--ranks", "5", "--bandwidth", "1e6"]
    *_, flight, _, train = run(capsys, *words, "--memory-cap", "7e9")[1].splitlines()
    assert flight.endswith("in flight full (7, 2, 1) reaches the period and needs 6.519 GiB on the fullest rank")
    assert train == (
        "train a GPT of pipeloom: pipeloom train --schedule pipedream --parallel.pipeline 3 --parallel.replicas 1,3,1 "
        "--parallel.in_flight full --parallel.cut 1,1,1 --model.layers 3 --steps 201 --eval_steps 51 --save_steps 102"
    )
    path.write_text(json.dumps({"layers": gpt_1_3_1(work=2.0)}))
    *_, flight, _, train = run(capsys, *words)[1].splitlines()
    assert "--parallel.in_flight" not in train  # three ranks with little to do: NOAM reaches the period
    assert "noam" not in flight
    path.write_text(json.dumps({"layers": [{**gpt_1_3_1()[0], "parameter_bytes": 1e9}, *gpt_1_3_1()[2:]]}))
    *_, train = run(capsys, *words)[1].splitlines()
    assert "--parallel.cut" not in train  # blocks.0 is missing: no GPT of ours
    path.write_text(json.dumps({"layers": [{**gpt_1_3_1()[0], "forward_seconds": 9}, *gpt_1_3_1(0.0)[1:]]}))
    *_, train = run(capsys, "--profile", str(path), "--ranks", "2", "--bandwidth", "1e6")[1].splitlines()
    assert train.startswith("pipeloom train cannot run this: parallel.cut=0,3: stage 0 has no block. Give it one")


def test_a_plan_under_a_cap_keeps_it_in_all_that_is_said(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": gpt_1_3_1()}))
    words = ["--profile", str(path), "--ranks", "5", "--bandwidth", "1e6", "--memory-cap", "6e9"]
    answer = json.loads(run(capsys, *words, "--json")[1])
    assert (answer["in_flight"], answer["full_in_flight"]) == ([5, 2, 1], [7, 2, 1])
    assert (answer["memory_bytes"], answer["full_memory_bytes"]) == ([5e9, 0, 1e9], [7e9, 0, 1e9])
    assert answer["noam_period_seconds"] == pytest.approx(6.0, rel=1e-12)  # 3 s and 9 s in turn, not 3 s
    *_, flight, _, train = run(capsys, *words)[1].splitlines()
    assert flight == (
        "in flight noam (5, 2, 1): 6 s per minibatch, within the memory cap; in flight full (7, 2, 1) reaches the "
        "period but needs 6.519 GiB on the fullest rank"
    )
    assert train.endswith("--model.layers 3 --steps 201 --eval_steps 51 --save_steps 102")


def test_fewer_ranks_are_in_the_numbers_too(capsys, profile):
    words = ["--profile", profile, "--bandwidth", "1", "--json", "--ranks"]
    fewer = json.loads(run(capsys, *words, "8")[1])["fewer_ranks"]
    alone = json.loads(run(capsys, *words, str(fewer["ranks"]))[1])
    assert (alone["period_seconds"], alone["fewer_ranks"]) == (fewer["period_seconds"], None)


def in_turn(replicas: tuple[int, ...]) -> list[dict[str, object]]:
    """Layers that are best as stages with these replicas: those of several ranks have no weights, others forbid it."""
    rows = ((f"layer {k}", r, 2 * r, 0, 0 if r > 1 else 1e12) for k, r in enumerate(replicas))
    return [dict(zip(KEYS, row, strict=True)) for row in rows]


@pytest.mark.parametrize(
    ("replicas", "refused"),
    [
        ((2, 1, 3, 1), None),
        ((1, 7, 1, 11, 1, 13, 1), None),  # all have updated after 1001 steps, and the model has a block for each stage
        (
            (7, 1, 11, 1, 13, 1, 16, 1),
            "the least common multiple is 16016, and at most 10000 steps may pass between drains",
        ),
    ],
)
def test_train_accepts_the_command_or_why_there_is_none_is_said(capsys, tmp_path, replicas, refused):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": in_turn(replicas)}))
    words = ["--profile", str(path), "--ranks", str(sum(replicas)), "--bandwidth", "1"]
    answer = json.loads(run(capsys, *words, "--json")[1])
    assert [stage["replicas"] for stage in answer["stages"]] == list(replicas)
    *_, train = run(capsys, *words)[1].splitlines()
    if refused:
        assert train.startswith("pipeloom train cannot run this: ")
        assert refused in train
        return
    config = parse(train.removeprefix("train a GPT of pipeloom: pipeloom train ").split())
    assert config.replicas == replicas
    validate_settings(config)


def test_a_tied_gpt_is_no_stream_of_several_stages():
    options = {"model.tie_embeddings": True}
    plan = Plan(schedule="pipedream", pipeline=2, microbatches=1, replicas=[1, 1], cut=[1, 1])
    with pytest.raises(InputError, match=r"model\.tie_embeddings=true: does not work with schedule 'pipedream'"):
        stream_command(plan, options)
    command = stream_command(replace(plan, pipeline=1, replicas=(2,), cut=(2,)), options)
    validate_settings(parse(command.split()[2:]))


def test_weights_that_stages_share_are_named_and_those_of_one_stage_count_once(capsys, tmp_path):
    path = tmp_path / "profile.json"
    layers = [{**layer, "parameter_bytes": 2**21} for layer in gpt_1_3_1()]
    words = ["--profile", str(path), "--state-copies", "3", "--bandwidth", "1e12", "--ranks"]
    path.write_text(json.dumps({"layers": layers, "ties": [{"bytes": 2**20, "layers": [0, 5]}]}))
    alone = json.loads(run(capsys, *words, "1", "--json")[1])
    assert (alone["memory_bytes"], alone["ties"]) == ([4 * (12 - 1) * 2**20], [])
    *_, train = run(capsys, *words, "1")[1].splitlines()
    assert "--model.tie_embeddings true" in train
    validate_settings(parse(train.removeprefix("train a GPT of pipeloom: pipeloom train ").split()))
    slow = [*words[:-2], "1", "--ranks", "2"]
    answer = json.loads(run(capsys, *slow, "--json")[1])
    assert answer["ties"] == [{"bytes": 2**20, "stages": [0, 1]}]
    *_, shared, train = run(capsys, *slow)[1].splitlines()
    assert shared == ("stages 0, 1 share weights of 1 MiB: the times leave out the sum of their gradients")
    assert train.startswith("pipeloom cannot train this: stages 0 and 1 share weights, but the stages of a stream")
    dapple = ["--schedule", "dapple", "--microbatches", "2"]
    assert run(capsys, *slow[:2], *slow[4:], *dapple)[1].splitlines()[-1] == shared


@pytest.mark.parametrize(
    ("ties", "said"),
    [
        ({}, "the profile: ties={}: must be a list"),
        ([{"bytes": 1}], "the profile: ties[0]: missing key 'layers'. Add it (keys"),
        ([{"bytes": -1, "layers": [0, 1]}], "the profile: ties[0].bytes=-1: must be a finite number"),
        ([{"bytes": 1, "layers": [0]}], "ties[0].layers=[0]: must be two or more layers of 0 to 3"),
        ([{"bytes": 1, "layers": [1, 0]}], "ties[0].layers=[1, 0]: must be two or more"),
        ([{"bytes": 1, "layers": [0, 4]}], "ties[0].layers=[0, 4]: must be two or more"),
        ([{"bytes": 1, "layers": [0, "b"]}], "the profile: ties[0].layers[1]='b': must be an integer"),
        (
            [{"bytes": 6, "layers": [0, 1]}] * 2,
            "layers[0].parameter_bytes=10: must be at least 12, the bytes of the tied weights",
        ),
    ],
)
def test_ties_that_cannot_be_are_refused(capsys, tmp_path, ties, said):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": LAYERS, "ties": ties}))
    code, _, err = run(capsys, "--profile", str(path), "--ranks", "2", "--bandwidth", "1")
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_names_are_printed_on_one_line(capsys, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"layers": [{**LAYERS[0], "name": "a\n\x1b[31m\ud800 é"}]}))
    _, out, _ = run(capsys, "--profile", str(path), "--ranks", "1", "--bandwidth", "1")
    assert r"a\n\x1b[31m\ud800 é" in out


def test_dapple(capsys, profile):
    words = ["--profile", profile, "--ranks", "4", "--bandwidth", "1e3", "--schedule", "dapple", "--microbatches", "8"]
    answer = json.loads(run(capsys, *words, "--json")[1])
    assert list(answer) == ["stages", "step_seconds", "least_step_seconds", "memory_bytes", "simulated_seconds", "ties"]
    assert len(answer["memory_bytes"]) == len(answer["stages"])
    assert sum(stage["replicas"] for stage in answer["stages"]) == 4
    assert answer["simulated_seconds"].keys() == {"1f1b", "dapple-pb"}
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "per step of 8 micro-batches" in out
    assert "simulated: " in out


def test_sizes_and_bandwidths_take_units(capsys, profile):
    words = ["--profile", profile, "--json"]
    plain = run(capsys, *words, "--ranks", "4", "--bandwidth", "2e3", "--memory-cap", "3072")[1]
    assert run(capsys, *words, "--ranks", "4", "--bandwidth", "2kB/s", "--memory-cap", "3 KiB")[1] == plain
    assert run(capsys, *words, "--levels", "4@2K", "--memory-cap", "3KiB")[1] == plain


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0"], "ranks=0: must be at least 1"),
        (["--ranks", "two"], "ranks"),
        (["--ranks", "1000000000"], "4 layers on 1000000000 ranks"),
        (["--bandwidth", "1e-300"], "bandwidth=1e-300: must be above 0"),
        (["--bandwidth", "0"], "bandwidth=0.0: must be above 0"),
        (
            ["--bandwidth", "1XB"],
            "--bandwidth=1XB: must be a bandwidth in bytes per second, such as 1.25e9, 12GB or 100MiB",
        ),
        (["--memory-cap", "1XB"], "--memory-cap=1XB: must be a size in bytes, such as 8e9, 16GB or 16GiB."),
        (["--bandwidth", "nan"], "--bandwidth=nan: must be a bandwidth"),
        (["--bandwidth", "inf"], "--bandwidth=inf: must be a bandwidth"),
        (["--memory-cap", "-1"], "--memory-cap=-1: must be a size in bytes, such as 8e9, 16GB or 16GiB"),
        (["--memory-cap", "9"], "needs at least 1010 bytes on some rank. Raise memory_cap (--memory-cap) to 1010."),
        (["--state-copies", "-1"], "state_copies=-1.0: must be from 0"),
        (["--state-copies", "1e300"], "state_copies=1e+300: must be from 0"),
        (["--form", "printed"], "--form=printed: must be one of summed, published."),
        (["--profile", "no/such/file"], "no/such/file"),
        (["--profile", "."], "--profile ."),
        (["--model.layers", "8"], "--model.layers: does not work with --profile"),
        (["--batch", "8"], "--batch: does not work with --profile"),
        (["--write-profile", "x"], "--write-profile: does not work with --profile"),
        (["--levels", "2@1e9"], "--bandwidth: does not work with --levels"),
        (["--schedule", "dapple"], "--schedule dapple needs the number of micro-batches per step. Add --microbatches"),
        (["--microbatches", "4"], "--microbatches works only with --schedule dapple"),
        (["--schedule", "dapple", "--microbatches", "0"], "num_microbatches=0: must be at least 1"),
        (["--schedule", "dapple", "--microbatches", "1" + "0" * 200], "microbatches=1000"),
        (
            ["--schedule", "dapple", "--microbatches", "4", "--memory-cap", "9"],
            "needs at least",
        ),
        (["--bandwith", "8"], "did you mean --bandwidth?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, profile, words, message):
    code, out, err = run(capsys, "--profile", profile, "--ranks", "4", "--bandwidth", "100", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "4"], "--bandwidth is missing"),
        (["--bandwidth", "4"], "--ranks is missing"),
        (["--levels", "4@fast"], "'4@fast' must be components@bandwidth"),
        (["--levels", "4"], "'4' must be components@bandwidth"),
        (["--levels", "0@1e9"], "ranks=0: must be at least 1, also the number before @"),
        (["--levels", "4@1e9,2@1e9", "--ranks", "4"], "has 8 ranks"),
    ],
)
def test_what_is_missing_or_no_level(capsys, profile, words, message):
    code, out, err = run(capsys, "--profile", profile, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_wrong_cluster_is_refused_before_anything_is_measured(capsys):
    code, _, err = run(capsys, "--ranks", "0", "--bandwidth", "1e9", "--model.layers", "2")
    assert code == 2
    assert "ranks=0: must be at least 1" in err


def changed(key: str, value: object) -> list[dict[str, object]]:
    return [LAYERS[0], {**LAYERS[1], key: value}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"layers": [], "layers": []}', "duplicate key 'layers'"),
        ("[]", "the profile is []: must be an object with keys layers, version"),
        ({"layers": {}}, "the profile: layers={}: must be a list"),
        ({"layers": []}, "layers=[]: a model needs at least one layer"),
        ({"layers": [1]}, "the profile: layers[0]=1: must be an object with keys"),
        ({"layers": LAYERS, "model": "x"}, "key 'model'"),
        (
            {"layers": LAYERS, "version": 2},
            "the profile: version=2: this release reads version 1",
        ),
        (
            {"layers": [{k: v for k, v in LAYERS[0].items() if k != "name"}]},
            "the profile: layers[0]: missing key 'name'",
        ),
        ({"layers": changed("flops", 1)}, "the profile: layers[1]: unknown key 'flops'"),
        ({"layers": changed("name", 1)}, "the profile: layers[1].name=1: must be a string"),
        ({"layers": changed("forward_seconds", -1)}, "layers[1].forward_seconds"),
        ({"layers": changed("backward_seconds", float("nan"))}, "layers[1].backward_seconds"),
        ({"layers": changed("activation_bytes", float("inf"))}, "layers[1].activation_bytes"),
        ({"layers": changed("parameter_bytes", "many")}, "layers[1].parameter_bytes"),
        ({"layers": changed("parameter_bytes", True)}, "layers[1].parameter_bytes"),
        ({"layers": changed("parameter_bytes", 10**400)}, "layers[1].parameter_bytes"),
        ({"layers": changed("parameter_bytes", 10**400)}, "=inf: must be"),
        (json.dumps({"layers": LAYERS}).replace('"name"', '"name": "z", "name"', 1), "duplicate key 'name'"),
        ({"layers": [{**LAYERS[0], "parameter_bytes": 1.7e308}] * 2}, "the profile: parameter_bytes add up to"),
    ],
)
def test_a_bad_profile_names_what_is_wrong(capsys, tmp_path, content, message):
    path = tmp_path / "profile.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    code, out, err = run(capsys, "--profile", str(path), "--ranks", "2", "--bandwidth", "1e9")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_worked_example_of_the_documentation_is_what_is_printed(capsys, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "partitioning.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    command, shown = re.search(r"\$ pipeloom partition ([^\n]*)\n(?!\$|```)(.*?)```", page, re.DOTALL).groups()
    assert run(capsys, *command.split()) == (0, shown, "")
    published = json.loads(run(capsys, *command.split(), "--form", "published", "--json")[1])
    assert [stage["replicas"] for stage in published["stages"]] == [7, 1]


def test_a_partition_is_written_as_a_plan(capsys, profile, tmp_path):
    path = tmp_path / "plan.json"
    words = ["--profile", profile, "--ranks", "4", "--bandwidth", "100"]
    plain = run(capsys, *words, "--json")[1]
    assert run(capsys, *words, "--json", "--out", str(path)) == (0, plain, "")
    answer, plan = json.loads(plain), Plan.load(path)
    assert (plan.schedule, plan.pipeline, plan.replicas, plan.cut) == ("pipedream", 2, (3, 1), (3, 1))
    assert (plan.num_ranks, plan.microbatches, plan.in_flight) == (4, 1, "noam")
    assert plan.predicted_step_seconds == answer["noam_period_seconds"]
    first, second = answer["memory_bytes"]
    assert plan.predicted_memory_bytes == (first, first, first, second)
    assert any("bottleneck: compute of stage 0" in reason for reason in plan.why)
    lines = run(capsys, *words, "--out", str(path))[1].splitlines()
    assert lines[0] == f"wrote {path}"
    assert f'train it in Python: pl.Pipeline(model, pl.Plan.load("{path}"))' in lines
    assert lines[-1].endswith(f"pipeloom train --plan {path} --steps 201 --eval_steps 51 --save_steps 102")


def test_the_plan_of_a_gpt_is_run_by_the_printed_command(capsys, tmp_path):
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    path.write_text(json.dumps({"layers": gpt_1_3_1()}))
    words = ["--profile", str(path), "--ranks", "5", "--bandwidth", "1e6"]
    *_, train = run(capsys, *words)[1].splitlines()
    *_, planned = run(capsys, *words, "--out", str(plan))[1].splitlines()
    prefix = "train a GPT of pipeloom: pipeloom train "
    config = parse(planned.removeprefix(prefix).split())
    validate_settings(config)
    assert Plan.load(plan).cut == (1, 1, 1)  # the blocks count
    expected = parse([*train.removeprefix(prefix).split(), "--parallel.chunks", "1", "--batch.microbatches", "1"])
    assert replace(config, plan=None) == expected


def test_a_synchronous_plan_has_as_many_replicas_of_each_stage(capsys, profile, tmp_path):
    path = tmp_path / "plan.json"
    words = [
        "--profile",
        profile,
        "--bandwidth",
        "1e3",
        "--schedule",
        "dapple",
        "--microbatches",
        "8",
        "--out",
        str(path),
    ]
    found = []
    for ranks in range(1, 9):
        code, out, err = run(capsys, *words, "--ranks", str(ranks), "--json")
        if code:
            assert "a synchronous schedule runs the same number of replicas of each stage" in err
            assert len(err.splitlines()) == 1
            continue
        answer, plan = json.loads(out), Plan.load(path)
        assert {stage["replicas"] for stage in answer["stages"]} == {plan.data}
        assert (plan.num_processes, plan.microbatches) == (ranks, 8)
        assert plan.predicted_step_seconds == min(answer["simulated_seconds"].values())
        found.append(plan)
    assert found
    assert "pipeloom train --plan" in run(capsys, *words, "--ranks", str(found[0].num_processes))[1]


def test_a_partition_that_no_stream_can_run_is_not_written(capsys, tmp_path):
    path, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    layers = [{**layer, "parameter_bytes": 2**21} for layer in gpt_1_3_1()]
    path.write_text(json.dumps({"layers": layers, "ties": [{"bytes": 2**20, "layers": [0, 5]}]}))
    words = ["--profile", str(path), "--state-copies", "3", "--bandwidth", "1", "--ranks", "2", "--out", str(plan)]
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert "stages 0 and 1 share weights" in err
    assert not plan.exists()
