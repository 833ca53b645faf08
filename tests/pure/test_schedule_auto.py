"""`pipeloom train --schedule auto`: what a run chooses from, what it predicts, and what it refuses."""

from dataclasses import replace

import pytest

from pipeloom.cli import main
from pipeloom.cli.train import parse
from pipeloom.errors import InputError, ScheduleError
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes
from pipeloom.schedules import FAMILIES, build
from pipeloom.train.auto.best_schedules import best_schedules, only_schedule, schedule_of_checkpoint
from pipeloom.train.config.automatic import for_processes, without_plan
from pipeloom.train.config.schedule import make_schedule, schedule_name
from pipeloom.train.config.schedule_choices import schedule_choices
from pipeloom.train.config.train_config import TrainConfig
from tests.pure.test_local_machine import machine


def auto(*options):
    return parse(["--schedule=auto", "--model.layers=8", *options])


def costs(asked, split=1.2, **device):
    """Costs of a machine on which blocks take nearly all time."""
    block = {False: (1e-2, 1e-2, 1e-2)}
    times = LayerTimes(element=4, rows={4: LayerSeconds((1e-4, 0.0, 1e-4), (2e-4, 2e-4, 2e-4), block, split=split)})
    cluster = machine().beside(asked.num_processes)
    cluster = replace(cluster, device=replace(cluster.device, **device))
    return CostModel(model=Architecture.of_gpt(asked.gpt(256)), cluster=cluster, measured=times)


def best(*options, **machine):
    asked = auto(*options)
    return best_schedules(asked, costs(asked, **machine), 256)


def names(*options):
    return {(found.schedule, found.parallel.chunks) for found in schedule_choices(auto(*options))}


def test_without_a_schedule_a_run_has_the_usual_one():
    assert TrainConfig().schedule is None
    assert parse(["--schedule=gpipe"]).schedule == "gpipe"
    assert make_schedule(TrainConfig()).name == schedule_name(TrainConfig()) == "1f1b"
    assert schedule_name(TrainConfig().changed("parallel", slices=2)) == "seq1f1b"
    with pytest.raises(InputError, match=r"schedule=auto: .* chooses the schedule when it starts. Name a schedule"):
        schedule_name(TrainConfig(schedule="auto"))


def test_the_choices_run_with_the_options():
    every = names()
    assert {("1f1b", 1), ("zb-v", 2), ("dualpipev", 2), ("interleaved", 2), ("interleaved", 4), ("bfs", 3)} <= every
    assert not {"naive", "search", "zb-auto", "pipedream"} & {name for name, _ in every}
    assert max(chunks for _, chunks in every) == 4  # 8 blocks on 2 ranks
    assert {chunks for _, chunks in names("--parallel.chunks=2")} == {2}
    assert names("--parallel.pipeline=1") == {("1f1b", 1)}
    sliced = names("--parallel.slices=2")
    assert all(FAMILIES[name].sliced for name, _ in sliced)
    assert ("seq1f1b", 1) in sliced
    assert ("zb-v", 2) not in names("--parallel.cut=5,3")
    assert {chunks for _, chunks in names("--parallel.cut=2,2,2,2")} == {2}


def test_the_predicted_best_comes_first_and_the_usual_schedule_is_there():
    found = best()
    seconds = [each.times.step for each in found]
    assert seconds[:-1] == sorted(seconds[:-1])
    usual = next(each for each in found if each.plan.schedule == "1f1b")
    assert seconds[0] < usual.times.step
    assert found[0].plan.predicted_step_seconds == seconds[0]
    assert found[0].words.startswith(f"{found[0].plan.schedule} with {found[0].plan.virtual_stages} chunks: ")
    assert " per step predicted; 1f1b: " in found[0].words
    assert " slower; " in found[0].words
    assert found[0].words.endswith(" schedules compared")
    [sliced] = [each for each in best("--parallel.slices=2") if each.plan.schedule == "seq1f1b"]
    assert sliced.plan.slices == 2


def test_the_usual_schedule_stays_where_none_is_faster():
    options = "--batch.microbatches=1", "--parallel.chunks=1"
    assert best(*options)[0].plan.schedule == "zb-h1"
    first, *_ = best(*options, split=3.0)
    assert first.words.startswith("1f1b: ")
    assert "; zb-h1: " in first.words


def test_memory_leaves_schedules_out():
    two = "--parallel.chunks=2"
    least = min(max(each.plan.predicted_memory_bytes) for each in best(two))
    few = best(two, memory_bytes=2.0 * least)
    assert max(max(each.plan.predicted_memory_bytes) for each in few) <= least
    with pytest.raises(InputError, match=r"schedule=auto: all schedules need at least .* Use --memory.recompute full"):
        best(two, memory_bytes=1000.0)
    with pytest.raises(InputError, match="Raise the cap"):
        best(two, "--memory.cap=1KiB")
    assert best(two, "--memory.cap=60MiB")


@pytest.mark.parametrize(
    ("saved", "kept"),
    [
        ({"schedule": "gpipe"}, ("gpipe", None)),
        ({"schedule": None}, ("1f1b", None)),
        ({"schedule": "auto"}, ("1f1b", None)),  # the name of the usual schedule in earlier versions
        ({"schedule": "interleaved", "chunks": 2}, ("interleaved", 2)),
        ({"schedule": "interleaved", "chunks": 2, "pipeline": 4}, None),
        ({"schedule": "interleaved", "chunks": 8}, None),  # 16 stages of 8 blocks
        ({"schedule": "pipedream"}, None),
    ],
)
def test_a_run_that_resumes_keeps_its_schedule(saved, kept):
    parallel = {"pipeline": 2, "chunks": None, **{key: saved[key] for key in saved if key != "schedule"}}
    found = schedule_of_checkpoint(auto(), {"schedule": saved["schedule"], "parallel": parallel})
    assert (found and (found.schedule, found.parallel.chunks)) == kept


def test_one_possible_schedule_is_not_measured():
    found = only_schedule(auto("--parallel.pipeline=1"))
    assert found is not None
    assert found.schedule == "1f1b"
    assert only_schedule(auto()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--local"], "schedule=auto with local=true: runs all ranks in this process"),
        (["--model.pretrained=model"], "schedule=auto with model.pretrained=model: times are measured for"),
        (["--parallel.replicas=2,1"], "schedule=auto with parallel.replicas=2,1: 1f1b is the only synchronous"),
        (["--parallel.slices=auto"], "schedule=auto with parallel.slices=auto: slices are measured for one schedule"),
        (["--parallel.cut=time"], "schedule=auto with parallel.cut=time: stages are cut by measured times once"),
        (["--recover"], "schedule=auto with recover=true: ranks that start again would measure again"),
        (["--elastic"], "schedule=auto with elastic=true: each layout would be measured"),
        (["--parallel.chunks=9"], "model.layers=8: schedule 'interleaved' has 18 stages"),
        (["--weights=vertical"], "weights=vertical: schedule '1f1b' does not take it."),
        (["--batch.size=4", "--batch.microbatches=8"], "batch.size=4: each of 8 micro-batches needs a sample."),
    ],
)
def test_what_a_schedule_that_is_chosen_refuses(options, message):
    with pytest.raises(InputError) as refusal:
        without_plan(for_processes(auto(*options), None))
    assert str(refusal.value).startswith(message)
    assert "\n" not in str(refusal.value)


def test_a_plan_of_all_degrees_chooses_the_schedule_too():
    asked = parse(["--parallel=auto", "--schedule=auto", "--processes=2"])
    assert for_processes(asked, None) == for_processes(parse(["--parallel=auto", "--processes=2"]), None)


def test_a_schedule_that_is_built_needs_a_name():
    with pytest.raises(ScheduleError, match=r"schedule 'auto': .* Pass a name, or the plan that `pl.plan` returns"):
        build("auto", num_ranks=2, num_microbatches=2)


def test_commands_that_run_nothing_need_a_name(capsys, tmp_path):
    assert main(["memory", "--schedule", "auto"]) == 2
    assert "schedule=auto: `pipeloom train` measures and chooses the schedule" in capsys.readouterr().err
    (tmp_path / "job.yaml").write_text("schedule: auto\n")
    assert main(["chaos", str(tmp_path / "job.yaml")]) == 2
    assert "schedule=auto: each run of a campaign must have the same schedule." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse(["--schedule=auto", "--print_config=skip_default"])
    assert capsys.readouterr().out == "schedule: auto\n"
