"""`pipeloom train --parallel auto`, `--schedule auto`, and plans that are chosen again: bitwise the same losses."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.cli.train import parse
from pipeloom.common.cores import usable_cores
from pipeloom.errors import InputError
from pipeloom.models import GPTConfig
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.layer_times import LayerSeconds, LayerTimes
from pipeloom.plan.local.references import References, Shape
from pipeloom.plan.local.saved import torch_version
from pipeloom.plan.local.trials import MOST_PLANS
from pipeloom.train.auto import run_planner
from pipeloom.train.config.automatic import for_processes
from pipeloom.train.data.opening import run_tokenizer
from pipeloom.train.loop import train_group
from pipeloom.train.machine import layers, reference_steps
from pipeloom.train.machine.exchanges import measure_collectives
from pipeloom.train.machine.layers import measure_layers
from pipeloom.train.machine.reference_steps import measure_references
from pipeloom.train.machine.trial_steps import measure_trials
from pipeloom.train.process_group import Group
from tests.pure.test_local_machine import machine

from .ranks import run_ranks
from .test_train import metrics, run, story, text, words

__all__ = ["text"]  # a fixture

TINY = ("--eval_steps=0", "--sample_tokens=0", "--batch.size=8", "--save_steps=4")


@pytest.fixture(autouse=True)
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time is measured once: how often plans take turns is tested in `test_trials.py`."""
    for name, value in {"PASSES": 1, "MOST_PASSES": 1, "MOST_PLANS": 3}.items():
        monkeypatch.setattr(f"pipeloom.plan.local.trials.{name}", value)
    for module in ("plan.local.trials", "train.machine.trial_steps"):
        monkeypatch.setattr(f"pipeloom.{module}.WARM_UP", 1)
        monkeypatch.setattr(f"pipeloom.{module}.STEPS", 2)
    monkeypatch.setattr(reference_steps, "_WARM_UP", 1)
    monkeypatch.setattr(reference_steps, "_STEPS", 2)
    costs = "pipeloom.train.auto.measured_costs"
    monkeypatch.setattr(f"{costs}.measure_layers", partial(measure_layers, rounds=1))
    monkeypatch.setattr(f"{costs}.measure_references", partial(measure_references, passes=1, seconds=0.3))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved measurement of this machine, so that runs do not measure it."""
    found = machine()
    here = replace(found.measured, machine=platform.node(), cores=usable_cores(), torch=torch_version())
    (tmp_path / "pipeloom").mkdir()
    (tmp_path / "pipeloom" / "local.json").write_text(replace(found, measured=here).to_json())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.usefixtures("measured")
def test_a_run_plans_itself(text: Path, tmp_path: Path) -> None:
    out, auto = tmp_path / "run", ("--parallel=auto", "--processes=2", "--steps=11", "--batch.size=4")
    done = run(text, out, *TINY, *auto)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (chosen,) = (line for line in lines if line.startswith("plan for 2 processes: "))
    assert " per step predicted" in chosen
    # Whether other plans are nearly as fast depends on what was measured.
    for trials in (line for line in lines if line.startswith("plan trials: ")):
        assert 2 <= trials.count(" predicted ") <= MOST_PLANS
    assert sum(line.startswith("plan after 10 steps: step ") for line in lines) == 1
    plan = pl.Plan.load(out / "plan.json")
    assert plan.num_processes == 2
    assert plan.batch_size == 4
    times = json.loads((out / "plan_times.json").read_text())
    assert times["predicted"]["step"] == plan.predicted_step_seconds
    assert all(times["measured"][name] >= 0 for name in ("step", "forward", "backward", "waits"))

    resumed = run(text, out, *TINY, *auto, "--resume_from_checkpoint=latest")
    assert resumed.returncode == 0, resumed.stderr
    assert "planning:" not in resumed.stdout
    assert re.search("^plan as in .*checkpoint-11: no step is left$", resumed.stdout, re.MULTILINE)

    again = tmp_path / "again"
    options = ("--steps=11", "--batch.size=4", f"--plan={out / 'plan.json'}")
    repeated = run(text, again, *TINY, *options)
    assert repeated.returncode == 0, repeated.stderr
    assert story(again) == story(out)
    assert "plan after 10 steps: step " in repeated.stdout


@pytest.mark.usefixtures("measured")
def test_a_run_chooses_its_schedule_and_keeps_it_when_it_resumes(text: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "run", ("--batch.microbatches=4", "--steps=6")
    done = run(text, out, *TINY, *options, "--schedule=auto")
    assert done.returncode == 0, done.stderr
    (chosen,) = (line for line in done.stdout.splitlines() if re.match("schedule .* per step predicted; ", line))
    plan = pl.Plan.load(out / "plan.json")
    assert chosen.startswith(f"schedule {plan.schedule}")
    config = parse([f"--config={out / 'config.yaml'}"])
    assert (config.schedule, config.parallel.chunks) == (plan.schedule, plan.virtual_stages)

    checkpoint = out / "checkpoint-4"
    resumed = run(
        text, tmp_path / "resumed", *TINY, *options, "--schedule=auto", f"--resume_from_checkpoint={checkpoint}"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(f"^schedule {plan.schedule}.*: as in {re.escape(str(checkpoint))}$", resumed.stdout, re.MULTILINE)
    assert story(tmp_path / "resumed") == story(out)[4:]


def _with_schedule(rank: int, argv: list[str]) -> tuple[str | None, int | None, list[str]]:
    """The schedule and the lines of one of four processes: two replicas, whose machine is not measured."""
    torch.set_num_threads(1)
    asked = for_processes(parse(argv), 4)

    class Planner(run_planner.RunPlanner):
        def _measured_costs(self) -> tuple[CostModel, list[str]]:
            sizes = asked.gpt(run_tokenizer(asked).vocabulary_size)
            return CostModel(model=Architecture.of_gpt(sizes), cluster=machine().beside(4)), []

        def _first_tried(self, best: Any) -> int:
            return min(2, super()._first_tried(best))

    planner = Planner(asked, Group(rank, 4, torch.device("cpu")))
    config = planner.first()
    assert config == replace(asked.changed("parallel", chunks=config.parallel.chunks), schedule=config.schedule)
    return config.schedule, config.parallel.chunks, planner.notes


@pytest.mark.parametrize(
    ("option", "words_of"),
    [
        ("--schedule=auto", r"^schedule=auto: .* Name a schedule\.$"),
        ("--parallel.auto=true", "^--parallel auto: .* Give "),
    ],
)
def test_a_run_on_gpus_is_not_planned_by_the_times_of_cpus(
    text: Path, tmp_path: Path, option: str, words_of: str
) -> None:
    degrees = () if "parallel" in option else ("--parallel.pipeline=2",)
    argv = words(text, tmp_path / "run", *TINY, option, *degrees)[1:]
    asked = for_processes(parse([word for word in argv if degrees or "parallel.pipeline" not in word]), 1)
    planner = run_planner.RunPlanner(asked, Group(0, 1, torch.device("cuda", 0)))
    with pytest.raises(InputError, match=words_of):
        planner.first()


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_processes_of_all_replicas_agree_on_a_schedule(text: Path, tmp_path: Path) -> None:
    options = ("--schedule=auto", "--parallel.data=2", "--parallel.data_strategy=zero1", "--steps=9")
    first, *others = run_ranks(_with_schedule, 4, words(text, tmp_path / "run", *TINY, *options)[1:])
    assert others == [first] * 3
    name, _, (chosen, *trials) = first
    assert chosen.startswith(f"schedule {name}")
    assert all(line.startswith(f"schedule trials: {name}") for line in trials)


def _slow_sums(cluster: Cluster) -> Cluster:
    """A machine on which replicas cost more than a bubble."""
    assert cluster.measured is not None
    slow = {"all_reduce": ((1000.0, 0.01), (1e6, 1.0))}
    rates = tuple(replace(each, curves={**each.curves, **slow}) for each in cluster.measured.rates)
    return replace(cluster, measured=replace(cluster.measured, rates=rates))


def _with_trials(rank: int, argv: list[str]) -> list[str]:
    """One of two processes, which try the two best plans, however near they are predicted to be."""
    torch.set_num_threads(1)
    asked = for_processes(parse(argv), 2)

    class Planner(run_planner.RunPlanner):
        def _measured_costs(self) -> tuple[CostModel, list[str]]:
            sizes = asked.gpt(run_tokenizer(asked).vocabulary_size)
            return CostModel(model=Architecture.of_gpt(sizes), cluster=machine().beside(2)), []

        def _first_tried(self, best: Any) -> int:
            return min(2, len(best))

    planner = Planner(asked, Group(rank, 2, torch.device("cpu")))
    planner.first()
    return planner.notes


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_trial_steps_choose_between_near_plans(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PASSES", "MOST_PASSES"):  # the plans take turns
        monkeypatch.setattr(f"pipeloom.plan.local.trials.{name}", 2)
    options = ("--parallel=auto", "--processes=2", "--steps=9")
    notes, others = run_ranks(_with_trials, 2, words(text, tmp_path / "run", *TINY, *options)[1:])
    assert notes == others
    chosen, trials = notes
    tried = trials.removeprefix("plan trials: ").split("; ")
    assert 2 <= len(tried) <= MOST_PLANS
    assert chosen.startswith(f"plan for 2 processes: {tried[0].split(':')[0]}: ")  # said first


def _tensor_trials(rank: int, argv: list[str]) -> list[list[float]]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # as after trial steps of pipelines, whose ranks draw other numbers
    asked = for_processes(parse(argv), 2)
    group = Group(rank, 2, torch.device("cpu"))
    return measure_trials([asked, asked], [0.01, 0.01], 2, group, run_tokenizer(asked).vocabulary_size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_trial_steps_of_ranks_that_share_layers_draw_the_same_numbers(text: Path, tmp_path: Path) -> None:
    options = ("--parallel.pipeline=1", "--parallel.tensor=2", "--processes=2", "--steps=2", "--model.dropout=0.1")
    first, second = run_ranks(_tensor_trials, 2, words(text, tmp_path / "run", *TINY, *options)[1:])
    assert first == second
    assert all(map(len, first))


def _planned_twice(rank: int, argv: list[str]) -> str:
    """One of two processes: the machine turns out to split backwards slowly."""
    torch.set_num_threads(1)
    asked = for_processes(parse(argv), 2)
    run_planner._COMPARED_AFTER = 3
    layers = LayerSeconds((1e-4, 0.0, 1e-4), (2e-4, 2e-4, 2e-4), {False: (1e-2, 1e-2, 1e-2)})

    class Planner(run_planner.RunPlanner):
        def _measured_costs(self) -> tuple[CostModel, list[str]]:
            return self._with(1.0), []

        def _with(self, split: float) -> CostModel:
            sizes = asked.gpt(run_tokenizer(asked).vocabulary_size)
            times = LayerTimes(element=4, rows={2: layers._replace(split=split)})
            return CostModel(model=Architecture.of_gpt(sizes), cluster=_slow_sums(machine()).beside(2), measured=times)

        def _refusal(self, plan: pl.Plan) -> str | None:
            return super()._refusal(plan) if (plan.pipeline, plan.virtual_stages) == (2, 1) else "other sizes"

        def _first_tried(self, best: Any) -> int:
            return 0  # steps would show at once that another one is faster

        def first(self, checkpoint: Path | None = None) -> Any:
            config = super().first(checkpoint)
            self._costs = self._with(2.0)
            return config

    planner = Planner(asked, Group(rank, 2, torch.device("cpu")))
    train_group(asked, Group(rank, 2, torch.device("cpu")), None, planner)
    return planner.notes[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_a_plan_that_is_chosen_again_has_the_same_losses(text: Path, tmp_path: Path) -> None:
    options = ("--parallel=auto", "--processes=2", "--steps=9", "--batch.microbatches=4", "--optimizer.clip_norm=0.5")
    again, once = (
        run_ranks(_planned_twice, 2, words(text, tmp_path / name, *TINY, *options, *more)[1:])
        for name, more in (("again", ("--replan=true",)), ("once", ()))
    )
    assert again[0].startswith("planned again, ")
    assert once[0].startswith("plan for 2 processes: ")
    assert story(tmp_path / "again") == story(tmp_path / "once")
    assert [row["step"] for row in metrics(tmp_path / "again")] == list(range(1, 10))
    first, second = (pl.Plan.load(tmp_path / name / "plan.json") for name in ("once", "again"))
    assert first.schedule != second.schedule


def _collectives(rank: int) -> dict[str, list[tuple[float, float]]]:
    return measure_collectives(2, [256, 4096, 16384])[0]


def test_a_larger_collective_takes_no_less() -> None:
    for found in run_ranks(_collectives, 2):
        for curve in found.values():
            assert [size for size, _ in curve] == [256.0, 4096.0, 16384.0]
            assert sorted(seconds for _, seconds in curve) == [seconds for _, seconds in curve]


def _references(rank: int) -> References:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    config = GPTConfig(vocabulary_size=16, layers=4, width=8, heads=2, sequence_length=4, dropout=0.1)
    fits = lambda of: of.pipeline == 1 or of.microbatch_size == 1  # noqa: E731
    found = measure_references(config, 4, precision=pl.Precision("fp32"), fits=fits, passes=1)
    twice = measure_references(config, 2, precision=pl.Precision("fp32"), shapes=[Shape(1, 2, 1, False)])
    assert [len(times) for row in twice.seconds.values() for times in row.values()] == [2 * reference_steps._STEPS]
    assert torch.equal(torch.get_rng_state(), state)
    return found


def test_reference_steps_are_of_the_slowest_process() -> None:
    first, second = run_ranks(_references, 2)
    assert first == second
    assert (first.processes, first.batch) == (2, 4)
    pipelines = [*Shape(2, 1, 1, False).with_schedules]
    alone = [Shape(1, 2, 1, False), Shape(1, 2, 1, True), Shape(1, 1, 2, False)]
    assert set(first.seconds) == {*pipelines, *alone}
    assert all(list(first.seconds[shape]) == [1] for shape in pipelines)
    assert list(first.seconds[Shape(1, 1, 2, False)]) == [1, 4]
    assert all(
        len(times) == reference_steps._STEPS and min(times) > 0
        for row in first.seconds.values()
        for times in row.values()
    )


def test_halves_of_the_backward_of_blocks_and_head_count_as_measured() -> None:
    """Stages of embedding and block, one block, two blocks, and block and head."""
    whole = [(1.5, 3.2), (1.0, 3.0), (2.0, 6.0), (3.0, 7.0)]  # F, B
    halves = [(1.0, 1.0), (2.0, 2.0), (3.0, 5.0), (4.0, 5.0)]  # I, W
    found = layers._of_stages(whole, halves, 2, experts=False)
    assert found.embedding == pytest.approx((0.5, 0.0, 0.2))
    assert found.blocks[False] == pytest.approx((1.0, 3 * 3 / 8, 3 * 5 / 8))
    assert found.head == pytest.approx((2.0, 4 * 2 / 5, 4 * 3 / 5))
    assert (found.split, found.head_split) == pytest.approx((8 / 6, 5 / 4))
    unknown = layers._of_stages(whole, None, 2, experts=False)
    assert (unknown.split, unknown.head_split) == (1.0, 1.0)
    assert unknown.head == pytest.approx((2.0, 2.0, 2.0))
