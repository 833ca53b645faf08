"""``--plan``: a plan sets options; what contradicts it is refused; the saved configuration repeats the run."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml

from pipeloom import schedules
from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.errors import InputError
from pipeloom.plan.plan import Plan
from pipeloom.train.config.planned import of_plan
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import make_schedule
from pipeloom.train.output.directory import repeatable, to_yaml

SLICED = Plan(schedule="seq1f1b", pipeline=3, microbatches=4, slices=[40, 44, 44], cut=[3, 2, 1], recompute="full")
SLICED_WORDS = (
    "--schedule seq1f1b --parallel.pipeline 3 --batch.microbatches 4 --parallel.slices 40,44,44 "
    "--parallel.cut 3,2,1 --memory.recompute full --parallel.chunks 1"
)
STREAM = Plan(schedule="pipedream", pipeline=2, microbatches=1, replicas=[2, 1], in_flight="full", batch_size=8)
STREAM_WORDS = (
    "--schedule pipedream --parallel.pipeline 2 --batch.microbatches 1 --parallel.replicas 2,1 "
    "--parallel.in_flight full --batch.size 8 --parallel.chunks 1"
)
SHARDED = Plan(
    schedule="bfs",
    pipeline=2,
    virtual_stages=3,
    microbatches=2,
    data=2,
    data_strategy="zero3",
    data_granularity="chunk",
    data_bucket_bytes=1 << 20,
    precision="bf16",
    gradients="same",
    offload="cpu",
    offload_states=True,
    offload_parameters=True,
)
SHARDED_WORDS = (
    "--schedule bfs --parallel.pipeline 2 --parallel.chunks 3 --batch.microbatches 2 --parallel.data 2 "
    "--parallel.data_strategy zero3 --parallel.data_granularity chunk --parallel.data_bucket_bytes 1MiB "
    "--precision.dtype bf16 --precision.gradients same --memory.offload cpu --memory.offload_parameters "
    "true"
)


@pytest.fixture
def saved(tmp_path):
    def save(plan: Plan) -> str:
        plan.save(tmp_path / "plan.json")
        return str(tmp_path / "plan.json")

    return save


@pytest.mark.parametrize(("plan", "words"), [(SLICED, SLICED_WORDS), (STREAM, STREAM_WORDS), (SHARDED, SHARDED_WORDS)])
def test_a_plan_sets_the_options_that_say_the_same(saved, plan, words):
    path = saved(plan)
    drains = ["--steps", "100", "--eval_steps", "50", "--save_steps", "50"]
    planned = parse(["--plan", path, *drains])
    assert dataclasses.replace(planned, plan=None) == parse([*words.split(), *drains])
    assert planned.plan == path
    validate_settings(planned)
    assert make_schedule(planned) == plan.make_schedule()
    assert parse(["--plan", path, *words.split(), *drains]) == planned  # what agrees may be given too


def test_what_contradicts_the_plan_is_refused_wherever_it_is_given(saved, tmp_path, monkeypatch, capsys):
    path = saved(SLICED)
    said = (
        f"parallel.pipeline=2: plan {path} has 3, and options must not contradict the plan. "
        "Remove parallel.pipeline, or make a new plan."
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"plan": path, "parallel": {"pipeline": 2}}))
    for words in (["--plan", path, "--parallel.pipeline", "2"], ["--config", str(file)]):  # 2 is the default, too
        with pytest.raises(InputError) as error:
            parse(words)
        assert str(error.value) == said
    with monkeypatch.context() as patch:
        patch.setenv("PIPELOOM_PARALLEL__PIPELINE", "2")
        patch.setenv("PIPELOOM_PLAN", path)
        assert main(["train"]) == 2
    assert capsys.readouterr().err == f"pipeloom: error: {said}\n"
    for words, told in (
        ("--schedule 1f1b", "schedule=1f1b: plan"),
        ("--parallel.data 2", "parallel.data=2: plan"),
        ("--parallel.replicas 2,1,1", "parallel.replicas=2,1,1: plan"),
        ("--parallel.slices 3", "parallel.slices=3: plan"),
        ("--batch.microbatches 8", "batch.microbatches=8: plan"),
        ("--memory.recompute none", "memory.recompute=none: plan"),
        ("--memory.cap 1GiB", "memory.cap=1GiB: plan"),
    ):
        with pytest.raises(InputError) as error:
            parse(["--plan", path, *words.split()])
        assert told in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_a_configuration_file_or_the_environment_names_a_plan(saved, tmp_path, monkeypatch):
    path = saved(SLICED)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"plan": path, "steps": 7}))
    planned = parse(["--plan", path, "--steps", "7"])
    assert parse(["--config", str(file)]) == planned
    monkeypatch.setenv("PIPELOOM_PLAN", path)
    assert parse(["--steps", "7"]) == planned


def test_what_the_plan_leaves_to_the_run_stays_free(saved):
    config = parse(["--plan", saved(SLICED), "--precision.dtype", "bf16", "--batch.size", "64", "--steps", "3"])
    assert (config.precision.dtype, config.batch.size, config.steps) == ("bf16", 64, 3)


def test_the_saved_configuration_needs_no_plan(saved, tmp_path):
    path = saved(SLICED)
    config = parse(["--plan", path, "--output_dir", str(tmp_path / "run")])
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(repeatable(config)))
    (tmp_path / "plan.json").unlink()
    again = parse(["--config", str(file)])
    assert again == dataclasses.replace(config, plan=None)
    assert repeatable(again) == again


def test_the_orders_of_a_plan_stay_in_its_file(saved, tmp_path, monkeypatch):
    own = schedules.zb_h1(num_ranks=2, num_microbatches=4)
    path = saved(Plan(schedule=own, pipeline=2, microbatches=4))
    monkeypatch.chdir(tmp_path)
    config = parse(["--plan", "plan.json"])
    validate_settings(config)
    assert make_schedule(config) == own
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(repeatable(config)))
    again = parse(["--config", str(file)])
    assert (again.plan, again.schedule) == (None, path)
    assert make_schedule(again) == own


def test_a_plan_that_cannot_be_read_is_one_line(tmp_path, capsys):
    (tmp_path / "plan.json").write_text('{"version": 7}')
    for name, said in (("plan.json", "version=7: this pipeloom reads versions 1 to 4."), ("none.json", "No such file")):
        assert main(["train", "--plan", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1


def test_memory_counts_what_a_plan_takes(saved, capsys):
    path = saved(SHARDED)
    model = ["--model.layers", "6"]
    assert main(["memory", "--plan", path, *model, "--json"]) == 0
    planned = capsys.readouterr().out
    assert main(["memory", *SHARDED_WORDS.split(), *model, "--json"]) == 0
    assert capsys.readouterr().out == planned


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_the_memory_of_a_plan_is_that_of_its_run(optimizer, tmp_path, capsys):
    """Some optimizers need full matrices, which replicas share out whole."""
    sizes = {"layers": 4, "width": 512, "heads": 8, "sequence_length": 256, "dropout": 0}
    model = [word for name, value in sizes.items() for word in (f"--model.{name}", str(value))]
    words = [*model, "--vocabulary_size", "1000", "--cluster", "dgx-a100-80", "--batch.size", "8", "--json"]
    fix, out = "pipeline=2,data=2,data_strategy=zero3,schedule=v-half", str(tmp_path / "plan.json")
    named = ["--optimizer", optimizer, "--fix", fix, "--top", "1", "--out", out]
    assert main(["plan", *words, "--devices", "4", *named]) == 0
    planned = json.loads(capsys.readouterr().out)["plans"][0]["peak_bytes"]
    assert main(["memory", *words, "--plan", out, "--optimizer.name", optimizer]) == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    assert max(planned) == pytest.approx(max(rank["peak"] for rank in ranks), rel=1e-3)


def test_an_option_of_the_plan_that_does_not_fit_names_the_plan(tmp_path):
    path = str(tmp_path / "plan.json")
    Plan(schedule="1f1b", pipeline=2, microbatches=4, batch_size=8, cut=[2, 2]).save(path)
    config = parse(["--plan", path, "--model.layers", "6", "--model.width", "64", "--model.heads", "4"])
    with pytest.raises(InputError) as error:
        validate_settings(config)
    assert str(of_plan(path, error.value)) == (
        f"plan {path} does not fit this run: parallel.cut=2,2: has 2 stages with 4 blocks; the run has 2 stages and 6 "
        "blocks. Change the run's other options, or use another plan."
    )
    other = InputError("optimizer.lr=-1: must be above 0. Use a larger one.")
    assert of_plan(path, other) is other
    assert of_plan(None, error.value) is error.value
