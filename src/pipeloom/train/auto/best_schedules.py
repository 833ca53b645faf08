"""``--schedule auto``: the fastest schedules of a run whose other options are given. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from math import inf
from typing import Any

from pipeloom.common.quantities import bytes_text, counted, percent_text, seconds_text
from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir import Schedule
from pipeloom.passes import merge_backwards
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.references import lower_quartile
from pipeloom.plan.local.trials import in_order
from pipeloom.plan.train_options import plan_of_options
from pipeloom.schedules import FAMILIES
from pipeloom.train.auto.best_plans import Chosen
from pipeloom.train.auto.plan_times import PlanTimes
from pipeloom.train.config.cluster_costs import configuration_of
from pipeloom.train.config.memory import under_cap
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import is_stream, make_schedule, usual_schedule
from pipeloom.train.config.schedule_choices import schedule_choices
from pipeloom.train.config.train_config import AUTO, TrainConfig, flat

_TOLERANCE = 0.005  # of predicted seconds: another schedule than the usual one has to be better by more


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A schedule that the run can have.

    Attributes:
        config: of the run with it.
        of: what its costs depend on.
        schedule: the orders.
        times: predicted.
        peaks: predicted peak memory per rank.
    """

    config: TrainConfig
    of: Configuration
    schedule: Schedule
    times: PlanTimes
    peaks: tuple[float, ...]


def best_schedules(asked: TrainConfig, costs: CostModel, vocabulary_size: int) -> list[Chosen]:
    """The schedules that are nearly as fast as the fastest, which comes first, and the usual one last or among them.

    Schedules with the same orders, such as 1f1b and gpipe with one micro-batch, are one.

    Args:
        asked: the configuration, with schedule ``auto``.
        costs: of the model on this machine.
        vocabulary_size: of the model.

    Raises:
        InputError: none fits into memory.
    """
    found: dict[Schedule, _Candidate] = {}
    memory, least = costs.cluster.device.memory_bytes or inf, inf
    refusal: PipeloomError | None = None
    for config in schedule_choices(asked):
        try:
            config, _ = under_cap(config, vocabulary_size, device="cpu")
        except InputError as error:
            refusal = refusal or error
            continue
        schedule = make_schedule(config)
        orders = replace(merge_backwards(schedule), name="orders")
        if orders in found:
            continue
        candidate = _candidate(config, schedule, costs, vocabulary_size)
        needed = asked.num_processes * max(candidate.peaks)
        if needed <= memory:
            found[orders] = candidate
        least = min(least, needed)
    if not found:
        if refusal is not None:
            raise refusal
        raise InputError(
            f"schedule=auto: all schedules need at least {bytes_text(least)}, and this machine has "
            f"{bytes_text(memory)}. Use --memory.recompute full, or a smaller model or batch."
        )
    usual = next((each for each in found.values() if each.schedule.name == usual_schedule(asked)), None)

    def seconds(each: _Candidate) -> float:
        return each.times.step * (1 - _TOLERANCE if each is usual else 1)

    ranked, first = in_order([*found.values()], seconds, usual)
    other = next((each for each in ranked if each is not usual), None)
    near = ranked[: first or 1]
    return [_chosen(each, other if each is usual else usual, len(found), first=first > 0) for each in near]


def _candidate(config: TrainConfig, schedule: Schedule, costs: CostModel, vocabulary_size: int) -> _Candidate:
    of = configuration_of(config, vocabulary_size)
    program = costs.lowered(of, schedule)
    step = costs.predict(of, program)
    return _Candidate(
        config=config,
        of=of._replace(chunks=schedule.placement.num_chunks),
        schedule=schedule,
        times=PlanTimes.predicted(step.timeline, step.step_seconds),
        peaks=tuple(costs.peak_bytes(of, program)),
    )


def _chosen(candidate: _Candidate, other: _Candidate | None, number: int, *, first: bool) -> Chosen:
    seconds = candidate.times.step
    words = f"{_words_of(candidate)}: {seconds_text(seconds)} per step predicted"
    if other is not None:
        more = other.times.step / seconds - 1
        words += (
            f"; {_words_of(other)}: {seconds_text(other.times.step)}, {percent_text(abs(more))} "
            f"{'slower' if more >= 0 else 'faster'}"
        )
    words += f"; {counted(number, 'schedule')} compared"
    plan = plan_of_options(
        dict(flat(asdict(candidate.config))),
        candidate.schedule,
        microbatches=candidate.config.num_microbatches,
        predicted_step_seconds=seconds,
        predicted_memory_bytes=candidate.peaks,
        why=(f"Schedule {words}.",),
    )
    return Chosen(plan=plan, of=candidate.of, times=candidate.times, words=words, first=first)


def _words_of(candidate: _Candidate) -> str:
    return schedule_words(candidate.schedule.name, candidate.config.parallel.chunks)


def schedule_words(name: str, chunks: int | None) -> str:
    """``interleaved with 2 chunks``, where the number is not the schedule's own."""
    own = name in FAMILIES and FAMILIES[name].chunks
    return name if own or (chunks or 1) == 1 else f"{name} with {chunks} chunks"


def schedule_trials_text(best: Sequence[Chosen], trials: Sequence[Sequence[float]], ranked: Sequence[int]) -> str:
    """What trial steps of schedules took, as `pipeloom.train.auto.best_plans.trials_text`."""
    return "; ".join(
        f"{schedule_words(best[number].of.schedule, best[number].of.chunks)}: "
        f"{seconds_text(lower_quartile(trials[number]))}, predicted "
        f"{seconds_text(best[number].times.step)}"
        for number in ranked
    )


def only_schedule(asked: TrainConfig) -> TrainConfig | None:
    """`asked` with the only schedule that runs with its options; None: there are several."""
    first, *others = islice(schedule_choices(asked), 2)
    return None if others else first


def schedule_of_checkpoint(asked: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig | None:
    """`asked` with the schedule of a checkpoint; None where it does not run with the options.

    Args:
        asked: the configuration, with schedule ``auto``.
        saved: the configuration of the run that wrote the checkpoint, as a mapping.
    """
    name, parallel = saved.get("schedule"), saved.get("parallel", {})
    if parallel.get("pipeline") != asked.parallel.pipeline:
        return None
    name = usual_schedule(asked) if name in (None, AUTO) else str(name)  # earlier versions called the usual one auto
    chunks = parallel.get("chunks")
    if is_stream(name) or asked.parallel.chunks not in (None, chunks):
        return None
    config = replace(asked.changed("parallel", chunks=chunks), schedule=name)
    try:
        validate_settings(config)
    except PipeloomError:
        return None
    return config
