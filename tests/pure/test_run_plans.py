"""Plans of a run: where the time of a step goes, which plans give the same losses, what `--parallel auto` refuses."""

from dataclasses import replace

import pytest
import torch

from pipeloom import schedules
from pipeloom.cli.train import parse
from pipeloom.errors import InputError
from pipeloom.passes import lower
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.costs.named_clusters import find_cluster
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes, mean_layers
from pipeloom.sim import Costs, Network, simulate
from pipeloom.train.auto import measured_costs, run_planner
from pipeloom.train.auto.best_plans import best_plans, memory_note
from pipeloom.train.auto.plan_times import PlanTimes
from pipeloom.train.auto.same_losses import same_losses
from pipeloom.train.config.automatic import for_processes, without_plan
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.process_group import Group
from tests.pure.test_local_machine import machine, model


def row(factor=1.0):
    times = (1.0 * factor, 0.0, 2.0 * factor), (3.0 * factor, 4.0 * factor, 5.0 * factor)
    return LayerSeconds(*times, {False: (6.0 * factor, 7.0 * factor, 8.0 * factor)}, split=1.5)


def test_measured_layers_are_read_back_averaged_and_corrected():
    times = LayerTimes(element=4, rows={1: row(), 2: row(2.0)}, update=0.5, step_seconds=1.0)
    assert LayerTimes.from_mapping(times.to_mapping()) == times
    other = LayerTimes(element=4, rows={1: row(3.0)}, update=1.5, step_seconds=2.0)
    assert mean_layers([times, other]) == LayerTimes(element=4, rows={1: row(2.0)}, update=1.0, step_seconds=1.5)
    slower = times.scaled(2.0, 3.0, 4.0)
    assert slower.rows[1].blocks[False] == (12.0, 21.0, 24.0)
    assert slower.rows[1].head == (6.0, 12.0, 15.0)
    assert (slower.update, slower.step_seconds) == (2.0, 4.0)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", None), ("zb-h1", None), ("interleaved", 2)])
def test_a_step_as_predicted_is_measured_the_same(name, chunks):
    schedule = schedules.build(name, num_ranks=2, num_microbatches=4, num_chunks=chunks)
    timeline = simulate(lower(schedule), Costs.uniform(), Network(latency_seconds=0.1))
    predicted = PlanTimes.predicted(timeline, timeline.makespan + 0.5)
    stages = [(share := 2 / schedule.num_stages, 0.0, share, share)] * schedule.num_stages
    measured = PlanTimes.measured(timeline.makespan + 0.5, timeline.bubble_fraction, stages, work=4 / 2)
    for attribute in ("step", "forward", "backward", "waits", "update"):
        assert getattr(measured, attribute) == pytest.approx(getattr(predicted, attribute)), attribute


def test_times_beside_predicted_ones():
    measured, predicted = PlanTimes(step=0.05, forward=0.004), PlanTimes(step=0.04, forward=0.003)
    assert measured.beside(predicted) == "step 50 ms (predicted 40 ms, 20% too low), forward 4 ms (3 ms)"
    assert measured.beside(PlanTimes(step=0.055)) == "step 50 ms (predicted 55 ms, 10% too high)"


def planned(parallel=None, **others):
    """A run of two ranks with a plan."""
    config = TrainConfig(schedule=others.pop("schedule", "1f1b")).changed("batch", size=16, microbatches=8)
    for section, values in others.items():
        config = config.changed(section, **values)
    return config.changed("parallel", **{"pipeline": 2, "cut": "3,3", **(parallel or {})})


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ({}, {"schedule": "zb-h1"}, True),
        ({}, {"schedule": "interleaved", "parallel": {"chunks": 2, "cut": "1,2,1,2"}}, True),
        ({}, {"parallel": {"cut": "2,4"}}, True),
        ({}, {"memory": {"recompute": "full"}}, True),
        ({}, {"schedule": "dualpipe"}, False),
        ({}, {"batch": {"microbatches": 4}}, False),
        ({}, {"parallel": {"pipeline": 1, "data": 2, "cut": "6"}}, False),
        ({"model": {"dropout": 0.1}}, {"schedule": "gpipe"}, False),
        ({"model": {"dropout": 0.1}}, {"memory": {"recompute": "full"}}, True),
        ({"model": {"experts": 4}}, {"schedule": "gpipe"}, True),
        ({"model": {"experts": 4, "router": "noisy-topk"}}, {"schedule": "gpipe"}, False),
        ({"model": {"experts": 4, "router": "noisy-topk"}}, {"parallel": {"cut": "2,4"}}, False),
        ({"model": {"dropout": 0.1}}, {"parallel": {"cut": "2,4"}}, False),
        ({"model": {"tie_embeddings": True}}, {"parallel": {"cut": "2,4"}}, False),
        ({"parallel": {"data": 2}}, {"parallel": {"cut": "2,4"}}, True),
        ({"parallel": {"data": 2, "data_strategy": "zero1"}}, {"parallel": {"cut": "2,4"}}, False),
        ({"parallel": {"data": 2, "data_strategy": "zero1"}}, {"schedule": "gpipe"}, True),
        ({"parallel": {"data": 4}}, {"parallel": {"cut": "2,4"}}, False),
    ],
)
def test_which_plans_have_the_same_losses(first, second, same):
    both = {name: {**first.get(name, {}), **second.get(name, {})} for name in {*first, *second} - {"schedule"}}
    both["schedule"] = second.get("schedule", "1f1b")
    assert same_losses(planned(**first), planned(**both)) is same


def test_the_processes_of_an_automatic_plan(monkeypatch):
    monkeypatch.setattr("pipeloom.train.config.automatic.usable_cores", lambda: 6)
    asked = parse(["--parallel", "auto"])
    assert for_processes(asked, None).num_processes == 6
    assert for_processes(asked, 4).num_processes == 4
    assert for_processes(parse(["--parallel=auto", "--processes=3"]), None).num_processes == 3
    plain = parse(["--parallel.pipeline=2"])
    assert for_processes(plain, None) is plain


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel", "many"], "--parallel=many: must be auto, or an option of the group, such as --parallel.data."),
        (["--parallel", "auto", "--parallel.pipeline", "2"], "parallel.pipeline=2: --parallel auto chooses it."),
        (["--parallel", "auto", "--parallel.tensor", "2"], "parallel.tensor=2: --parallel auto chooses it."),
        (["--parallel", "auto", "--local"], "--parallel auto with local=true: runs all ranks in this process"),
        (["--parallel", "auto", "--processes", "0"], "processes=0: must be at least 1."),
        (["--parallel", "auto", "--memory.offload", "cpu"], "--parallel auto with memory.offload=cpu"),
        (
            ["--parallel=auto", "--optimizer.replica_scaling=true"],
            "--parallel auto with optimizer.replica_scaling=true: is",
        ),
        (
            ["--parallel=auto", "--optimizer.staleness=inverse"],
            "--parallel auto with optimizer.staleness=inverse: is for",
        ),
        (
            ["--parallel=auto", "--batch.size=6", "--batch.microbatches=4"],
            "--parallel auto with batch.microbatches=4: ",
        ),
        (["--parallel", "auto", "--batch.microbatches", "-4"], "batch.microbatches=-4: must be at least 1."),
        (["--parallel", "auto", "--schedule", "pipedream"], "--parallel auto with schedule=pipedream: plans have"),
        (["--parallel", "auto", "--schedule", "search"], "--parallel auto with schedule=search: plans have"),
        (["--parallel", "auto", "--schedule", "orders.csv"], "--parallel auto with schedule=orders.csv: plans have"),
        (["--parallel", "auto", "--schedule", "1f2b"], "schedule '1f2b' is unknown"),
    ],
)
def test_what_an_automatic_plan_refuses(options, message):
    with pytest.raises(InputError) as refusal:
        for_processes(parse(options), None)
    assert str(refusal.value).startswith(message)


def test_an_automatic_plan_may_have_replicas_with_buckets_of_a_given_size():
    options = "--processes=2", "--parallel.data_bucket_bytes=100000", "--model.layers=4"
    asked = for_processes(parse(["--parallel=auto", *options]), None)
    validate_settings(without_plan(asked))
    costs = CostModel(model=model(), cluster=machine())
    found = best_plans(asked, costs, 2, run_planner.RunPlanner(asked, Group(0, 2, torch.device("cpu")))._refusal)
    assert {each.of.data for each in found} == {2}


def test_an_automatic_plan_has_the_processes_of_torchrun():
    asked = replace(parse(["--parallel", "auto"]), processes=3)
    with pytest.raises(InputError, match="processes=3: torchrun started 2"):
        for_processes(asked, 2)


def test_an_automatic_plan_keeps_the_format_of_gradients_and_names_options_of_train():
    asked = parse(["--parallel=auto", "--precision.dtype=bf16", "--precision.gradients=same", "--batch.microbatches=3"])
    costs = CostModel(model=model(), cluster=machine())
    with pytest.raises(InputError, match=r"--processes=2 --batch\.size=16: .* Change --batch\.size or other options"):
        best_plans(asked.changed("batch", size=16), costs, 2, lambda _: None)
    found = best_plans(asked.changed("batch", size=16, microbatches=2), costs, 2, lambda _: None)
    assert {each.plan.gradients for each in found} == {"same"}


def test_a_cap_above_the_memory_of_the_machine_is_said():
    costs = CostModel(model=model(), cluster=find_cluster("dgx-a100-80", "--cluster"))
    usable = costs.cluster.usable_bytes(2)
    assert memory_note(parse([f"--memory.cap={int(usable)}"]), costs, 2) is None
    assert memory_note(parse([]), costs, 2) is None
    note = memory_note(parse([f"--memory.cap={int(2 * usable)}"]), costs, 2)
    assert note is not None
    assert note.startswith("memory: plans use at most ")


@pytest.mark.parametrize(("load", "said"), [(2.5, ""), (9.25, "; other programs seem to compute too: the load is 9.2")])
def test_steps_much_longer_than_predicted_say_whether_others_compute(monkeypatch, load, said):
    monkeypatch.setattr(run_planner, "usable_cores", lambda: 2)
    monkeypatch.setattr(run_planner.os, "getloadavg", lambda: (load, 0.0, 0.0))
    planner = run_planner.RunPlanner(parse([]), Group(0, 2, torch.device("cpu")))
    monkeypatch.setattr(planner, "_write", lambda *_: None)
    monkeypatch.setattr(planner, "_measured", lambda: PlanTimes(step=0.05))
    planner._times = PlanTimes(step=0.025)
    rows = [{"step_seconds": 0.05, "bubble_fraction": 0.0}] * 10
    assert [planner.observe(row) for row in rows] == [None] * 9 + [
        f"plan after 10 steps: step 50 ms (predicted 25 ms, 50% too low){said}"
    ]


def test_a_measurement_that_is_damaged_or_cannot_be_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pipeloom").mkdir()
    for content in (b"{", b"\xff\xfe", b"{}"):
        (tmp_path / "pipeloom" / "local.json").write_bytes(content)
        assert measured_costs._saved() is None
    monkeypatch.setattr(measured_costs, "measure_machine", machine)
    found, unsaved = measured_costs._measured_now()
    assert (found, unsaved) == (machine(), None)
    assert find_cluster("local", "--cluster") == machine()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found, unsaved = measured_costs._measured_now()
    assert found == machine()
    assert unsaved.endswith("Not a directory")
