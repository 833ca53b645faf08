"""`RunPlanner`: chooses the plan of a run from measured layers, compares it with the steps, and chooses again."""

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from pipeloom.common.atomic_file import write_whole
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.cores import usable_cores
from pipeloom.common.quantities import counted, percent_text
from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir import Schedule
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.trials import plain_ones, ranking
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import options_of_plan
from pipeloom.train.auto.best_plans import (
    Chosen,
    best_plans,
    memory_note,
    plan_of_checkpoint,
    predicted_times,
    trials_text,
)
from pipeloom.train.auto.best_schedules import (
    best_schedules,
    only_schedule,
    schedule_of_checkpoint,
    schedule_trials_text,
    schedule_words,
)
from pipeloom.train.auto.measured_costs import measured_costs
from pipeloom.train.auto.plan_times import PlanTimes
from pipeloom.train.auto.same_losses import same_losses
from pipeloom.train.checkpoint import load
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import schedule_name
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.opening import run_tokenizer
from pipeloom.train.data.written import PLAN_NAME, PLAN_TIMES_NAME
from pipeloom.train.machine.trial_steps import measure_trials
from pipeloom.train.output.directory import writing
from pipeloom.train.process_group import Group
from pipeloom.train.run_parts import RunParts

_COMPARED_AFTER = 10  # steps of this process with a plan; the first one warms up
_RECENT = 20  # steps whose median is compared
_GAIN = 0.05  # by which another plan must be predicted faster
_MUCH_LONGER = 1.2  # times the predicted step: other programs may be the reason


class RunPlanner:
    """The plan of a run; every process has one and calls the same methods.

    Args:
        config: of the run, with ``parallel.auto``, schedule ``auto`` or ``plan``.
        group: its processes.

    Attributes:
        notes: lines about the choice.
    """

    def __init__(self, config: TrainConfig, group: Group) -> None:
        self._asked, self._group = config, group
        self._config = config
        self._times: PlanTimes | None = None  # predicted
        self._plan: Plan | None = None
        self._costs: CostModel | None = None
        self._of: Configuration | None = None  # of the plan, on process 0
        self._slower: list[dict[str, Any]] = []  # options of plans whose trial steps were slower, likewise
        self._steps: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._number = 0
        self.notes: list[str] = []

    def first(self, checkpoint: Path | None = None) -> TrainConfig:
        """The configuration with a plan: measured and searched with ``parallel.auto`` or schedule ``auto``, else given.

        Args:
            checkpoint: that the run resumes from, whose schedule it keeps with schedule ``auto``; None: a new run.

        Raises:
            InputError: the run computes on GPUs, for which nothing is measured, or no plan fits.
        """
        if not self._asked.measures_plan:
            assert self._asked.plan is not None
            self._plan = Plan.load(self._asked.plan)
            seconds = self._plan.predicted_step_seconds
            self._times = None if seconds is None else PlanTimes(step=seconds)
            return self._asked
        whole = self._asked.parallel.auto
        if (known := self._known(checkpoint)) is not None:
            return known
        if self._group.device.type != "cpu":
            asked = "--parallel auto" if whole else "schedule=auto"
            instead = "Give degrees, or a plan of `pipeloom plan`" if whole else "Name a schedule"
            raise InputError(f"{asked}: times are measured on CPUs, and the run computes on GPUs. {instead}.")
        self._enter("planning")
        self._costs, said = self._measured_costs()
        found: dict[str, Any] | None = None
        best: list[Chosen] = []
        if self._group.rank == 0:
            try:
                best = self._best(self._costs)
                found = {"plans": [each.plan.to_json() for each in best], "first": self._first_tried(best)}
            except PipeloomError as error:  # the others wait for an answer
                found = {"error": str(error)}
        answer = self._agreed(found)
        plans, first = [Plan.from_json(each) for each in answer["plans"]], answer["first"]
        if first:
            self._say(f"planning: trial steps of {counted(first, 'plan' if whole else 'schedule')}")
        trials = self._trials(plans, first)
        if self._group.rank == 0:
            if whole and (note := memory_note(self._asked, self._costs, self._group.size)) is not None:
                said.append(note)
            number, *slower = ranked = ranking(trials, plain_ones(plans)) or [0]
            self._slower = [options_of_plan(plans[each]) for each in slower]
            begin = f"plan for {_processes(self._group.size)}:" if whole else "schedule"
            said.append(f"{begin} {best[number].words}")
            if slower:
                said.append(
                    f"plan trials: {trials_text(best, trials, ranked)}"
                    if whole
                    else f"schedule trials: {schedule_trials_text(best, trials, ranked)}"
                )
            found = self._answer(best[number], said)
        taken = self._taken(found)
        self._enter("setup")
        return taken

    def _known(self, checkpoint: Path | None) -> TrainConfig | None:
        """The configuration with a plan or schedule that needs no measuring; None: measure. A collective call."""
        answer: dict[str, Any] = {}
        if self._group.rank == 0:
            try:
                known, note = self._without_measuring(checkpoint)
            except PipeloomError as error:  # the others wait for an answer
                answer = {"error": str(error)}
            else:
                answer = {} if known is None else {"config": known.to_json(), "notes": [note]}
        answer = self._agreed(answer)
        if not answer:
            return None
        self.notes, self._config = answer["notes"], TrainConfig.from_json(answer["config"])
        return self._config

    def _without_measuring(self, checkpoint: Path | None) -> tuple[TrainConfig | None, str]:
        """On process 0, the configuration that needs no measuring, if there is one, and what to say."""
        asked, whole = self._asked, self._asked.parallel.auto
        known, why = (None, "") if whole else (only_schedule(asked), "no other one runs with these options")
        if known is None and checkpoint is not None:
            saved = load(checkpoint, key=CheckpointKey.read(asked.checkpoint_key_file))
            of_checkpoint, why = saved.state.get("config", {}), f"as in {checkpoint}"
            if not whole:
                known = schedule_of_checkpoint(asked, of_checkpoint)
            elif saved.step >= asked.steps:
                known = plan_of_checkpoint(asked, of_checkpoint)
        if known is None or whole:
            return known, f"plan {why}: no step is left"
        return known, f"schedule {schedule_words(schedule_name(known), known.parallel.chunks)}: {why}"

    def _best(self, costs: CostModel) -> list[Chosen]:
        """The plans that may run trial steps, the predicted best one first."""
        if self._asked.parallel.auto:
            return best_plans(self._asked, costs, self._group.size, self._refusal)
        return best_schedules(self._asked, costs, run_tokenizer(self._asked).vocabulary_size)

    def _enter(self, phase: str) -> None:
        """Name what the process does, for messages of the watchdog."""
        self._group.black_box.enter(phase, patient=True)

    def _say(self, text: str) -> None:
        """Show what takes its time before the run has a display."""
        if self._group.rank == 0:
            print(text, flush=True)

    def _first_tried(self, best: Sequence[Chosen]) -> int:
        """How many of the best plans run trial steps first: none where a first step compiles or captures for long."""
        if self._asked.compile or self._asked.graphs or len(best) < 2:
            return 0
        return sum(each.first for each in best)

    def _trials(self, plans: Sequence[Plan], first: int) -> list[list[float]]:
        """Seconds of trial steps of each plan, of which so many run some first; a collective call."""
        configs = [planned_config(self._asked, plan) for plan in plans] if first else []
        predicted = [plan.predicted_step_seconds or 0.0 for plan in plans[: len(configs)]]
        return measure_trials(configs, predicted, first, self._group, run_tokenizer(self._asked).vocabulary_size)

    def _answer(self, chosen: Chosen, notes: Sequence[str]) -> dict[str, Any]:
        self._of = chosen.of
        return {"plan": chosen.plan.to_json(), "times": chosen.times.to_mapping(), "notes": list(notes)}

    def _taken(self, found: dict[str, Any] | None) -> TrainConfig:
        """The configuration that process 0 found, on every process."""
        answer = self._agreed(found)
        self._plan, self.notes = Plan.from_json(answer["plan"]), answer["notes"]
        self._times = PlanTimes.from_mapping(answer["times"])
        plan = self._plan
        self._config = (
            planned_config(self._asked, plan)
            if self._asked.parallel.auto
            else self._with_schedule(str(plan.schedule), plan.virtual_stages)
        )
        return self._config

    def _with_schedule(self, name: str, chunks: int | None) -> TrainConfig:
        return replace(self._asked.changed("parallel", chunks=chunks), schedule=name)

    def _agreed(self, found: dict[str, Any] | None) -> dict[str, Any]:
        """What process 0 found, on every process. Raises InputError if it found an error."""
        answer: dict[str, Any] = self._group.gather_json(found)[0]
        if "error" in answer:
            raise InputError(answer["error"])
        return answer

    def _refusal(self, plan: Plan) -> str | None:
        if isinstance(plan.schedule, Schedule):
            return "the orders of the schedule are in a file"
        try:
            planned_config(self._asked, plan)
        except PipeloomError as error:
            return str(error)
        return None

    def _measured_costs(self) -> tuple[CostModel, list[str]]:
        """Costs of the model on this machine, the same on every process, and lines about it; a collective call."""
        return measured_costs(self._asked, self._group, self._say)

    # Steps of the plan

    def begin(self, run: RunParts) -> None:
        """The steps of a plan begin."""
        self._run, self._number = run, 0
        self._steps.clear()
        if run.schedule.microbatches_per_update is not None:
            self._times = None  # a plan predicts a stream per micro-batch
        if self._asked.measures_plan and self._plan is not None:
            self._write(PLAN_NAME, self._plan.to_json())

    def observe(self, row: Mapping[str, Any]) -> str | None:
        """Take the metrics of a step; a line that compares steps and plan after some of them, once."""
        if self._times is None:
            return None
        self._number += 1
        if self._number > 1:
            self._steps.append((row["step_seconds"], row["bubble_fraction"]))
        if self._number != _COMPARED_AFTER:
            return None
        measured = self._measured()
        found = {"measured": measured.to_mapping(), "predicted": self._times.to_mapping()}
        self._write(PLAN_TIMES_NAME, json.dumps(found, indent=1))
        busy = _others_text(self._group.size) if measured.step > _MUCH_LONGER * self._times.step else ""
        return f"plan after {counted(self._number, 'step')}: {measured.beside(self._times)}{busy}"

    def _write(self, name: str, text: str) -> None:
        if self._group.rank == 0:
            with writing(path := self._run.output_dir / name):
                write_whole(path, text + "\n")

    def _measured(self) -> PlanTimes:
        seconds, bubbles = zip(*self._steps, strict=True)
        work = self._config.num_microbatches / self._config.num_ranks
        stages = self._run.predictor.stage_seconds()
        return PlanTimes.measured(median(seconds), median(bubbles), stages, work=work)

    @property
    def plans_again(self) -> bool:
        """Whether `again` may choose another plan."""
        return self._asked.replan

    def again(self) -> TrainConfig | str | None:
        """After a checkpoint with ``replan``: the configuration of a faster plan with the same losses, or a line that
        says why the plan stays; None: it did not plan again.

        The measured layers and updates are corrected by what the steps take over their prediction. Another plan must
        then be predicted faster by more than 5 %.
        """
        if not self._asked.replan or self._number < _COMPARED_AFTER:
            return None
        found: dict[str, Any] | None = None
        if self._group.rank == 0:
            found = self._better()
        stays = self._group.gather_json("" if found is None else found.get("stays"))[0]
        return stays if stays is not None else self._taken(found)

    def _better(self) -> dict[str, Any]:
        assert self._costs is not None
        assert self._costs.measured is not None
        assert self._plan is not None
        assert self._of is not None
        assert self._times is not None
        layers = self._costs.measured.scaled(*_ratios(self._measured(), self._times))
        costs = replace(self._costs, measured=layers, _layers={}, _others={})
        running, of = predicted_times(costs, self._of), self._of
        fixed = {
            "pipeline": of.pipeline,
            "data": of.data,
            "tensor": of.inside.tensor,
            "sequence": of.inside.sequence,
            "expert": of.inside.expert,
            "microbatches": of.microbatches,
            "data_strategy": of.strategy,
            "data_granularity": of.granularity,
        }

        def refusal(plan: Plan) -> str | None:
            if (why := self._refusal(plan)) is not None:
                return why
            if options_of_plan(plan) in self._slower:
                return "slower in trial steps"
            return None if same_losses(self._config, planned_config(self._asked, plan)) else "other losses"

        try:
            chosen = best_plans(self._asked, costs, self._group.size, refusal, fixed)[0]
        except InputError:
            return {"stays": "planned again: no other plan has the same losses; it stays"}
        gain = 1 - chosen.times.step / running.step
        if gain <= _GAIN:
            best = "no faster" if gain <= 0 else f"only {percent_text(gain)} faster"
            return {"stays": f"planned again: the plan stays; the best one with the same losses is {best}"}
        return self._answer(chosen, [f"planned again, {percent_text(gain)} faster: {chosen.words}"])


def _ratios(measured: PlanTimes, predicted: PlanTimes) -> tuple[float, float, float]:
    """Measured over predicted seconds of forwards, backwards and updates."""
    pairs = [(getattr(measured, name), getattr(predicted, name)) for name in ("forward", "backward", "update")]
    forward, backward, update = (value / guess if value and guess else 1.0 for value, guess in pairs)
    return forward, backward, update


def _others_text(processes: int) -> str:
    """What else may make steps longer; empty: no sign of it."""
    try:
        load = os.getloadavg()[0]
    except OSError:  # unknown here
        return ""
    busy = load > max(processes, usable_cores()) + 1
    return f"; other programs seem to compute too: the load is {load:.1f}" if busy else ""


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"


def planned_config(asked: TrainConfig, plan: Plan) -> TrainConfig:
    """The configuration with the options of a plan.

    Raises:
        InputError: the run cannot have them.
    """
    mapping = asked.to_mapping()
    mapping["parallel"]["auto"] = False
    for key, value in options_of_plan(plan).items():
        section, _, name = key.rpartition(".")
        (mapping[section] if section else mapping)[name] = value
    config = replace(TrainConfig.from_mapping(mapping), processes=None, replan=False)
    validate_settings(config)
    return config
