"""The best plans that a run can have on its processes, by the search of `pipeloom.plan.search`. No torch here."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeloom.common.quantities import bytes_text, percent_text, seconds_text
from pipeloom.errors import PipeloomError
from pipeloom.ir.recompute import Recompute
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.cost_model import CostModel
from pipeloom.plan.local.references import lower_quartile
from pipeloom.plan.local.trials import MOST_PLANS, in_order
from pipeloom.plan.plan import Plan
from pipeloom.plan.search.answer import plan_of, predicted
from pipeloom.plan.search.best_first import find_plans
from pipeloom.plan.search.comparison import plain_of, with_plain
from pipeloom.plan.search.request import TRAIN, Request
from pipeloom.plan.search.simulated import Simulated
from pipeloom.train.auto.plan_times import PlanTimes
from pipeloom.train.config.automatic import KEPT
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.train_config import TrainConfig

_UNMEASURED = frozenset({"slices", "context", "offload"})  # whose times on a machine are not measured


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A plan.

    Attributes:
        plan: it.
        of: its configuration.
        times: predicted.
        words: one line about it.
        first: whether it runs trial steps first.
    """

    plan: Plan
    of: Configuration
    times: PlanTimes
    words: str
    first: bool


def best_plans(
    asked: TrainConfig,
    costs: CostModel,
    processes: int,
    refusal: Callable[[Plan], str | None],
    fixed: dict[str, Any] | None = None,
) -> list[Chosen]:
    """Search for the best plans: those that run trial steps first, the one with the least predicted seconds before all
    others and a plain one (`pipeloom.plan.search.comparison.plain_of`) among them, then those that may run some too,
    the best one with each mesh and schedule before others like it.

    Schedules of the same orders, such as 1f1b and gpipe with one micro-batch, are one plan.

    Args:
        asked: the configuration, with the options that the plan must keep.
        costs: of the model on this machine.
        processes: of the run.
        refusal: why the run cannot have a plan; None: it can.
        fixed: more values that the plan must have.

    Raises:
        InputError: no plan fits.
    """

    def accept(found: Simulated) -> str | None:
        try:
            return refusal(plan_of(costs, found.of, found.schedule_limit))
        except PipeloomError as error:
            return str(error)

    request = _request(asked, costs, processes, fixed or {})
    answer = find_plans(costs, request, accept=accept)
    plans = list({_orders_of(found): found for found in reversed(answer.plans)}.values())[::-1]
    plans = with_plain(costs, request, plans, accept=accept)
    plans, number = in_order(plans, lambda found: found.step_seconds, plain_of(plans))
    first = number or 1
    kinds, others = {_kind_of(found.of) for found in plans[:first]}, list[Simulated]()
    for found in plans[first:]:
        others += [found] if _kind_of(found.of) not in kinds else []
        kinds.add(_kind_of(found.of))
    others += [found for found in plans[first:] if found not in others]
    return [
        _chosen(costs, found, plans, answer.considered, first=at < number)
        for at, found in enumerate((*plans[:first], *others))
    ]


def _kind_of(of: Configuration) -> Hashable:
    """Equal for plans whose predictions err alike: with the same mesh and schedule."""
    return of.pipeline, of.data, of.inside, of.strategy, of.schedule


def _orders_of(found: Simulated) -> tuple[Any, ...]:
    """Equal for plans that run the same actions in the same order."""
    of = found.of
    return of.pipeline, of.data, of.inside, of.strategy, of.microbatches, of.chunks, found.step_seconds


def _chosen(costs: CostModel, found: Simulated, plans: Sequence[Simulated], considered: int, *, first: bool) -> Chosen:
    words = (
        f"{words_of(found.of)}: {seconds_text(found.step_seconds)} per step predicted, bubble "
        f"{percent_text(found.timeline.bubble_fraction)}"
    )
    others = [each for each in plans if each is not found]
    if others:
        ratio = others[0].step_seconds / found.step_seconds
        by = percent_text(abs(ratio - 1))
        before = f"next of {considered:,}" if others[0] is not plans[0] else "predicted best"
        words += f"; {before}: {words_of(others[0].of)}, {by} {'slower' if ratio >= 1 else 'faster'}"
    plan = plan_of(costs, found.of, found.schedule_limit, why=(f"{words}.",), **predicted(found))
    return Chosen(plan=plan, of=found.of, times=predicted_times(costs, found.of), words=words, first=first)


def trials_text(best: Sequence[Chosen], trials: Sequence[Sequence[float]], ranked: Sequence[int]) -> str:
    """What trial steps of plans took, in the order `ranked`: ``1f1b: 5.2 ms, predicted 5.0; ..``."""
    return "; ".join(
        f"{words_of(best[number].of)}: {seconds_text(lower_quartile(trials[number]))}, predicted "
        f"{seconds_text(best[number].times.step)}"
        for number in ranked
    )


def predicted_times(costs: CostModel, of: Configuration) -> PlanTimes:
    """The predicted times of a configuration."""
    step = costs.predict(of)
    return PlanTimes.predicted(step.timeline, step.step_seconds)


def _request(asked: TrainConfig, costs: CostModel, processes: int, fixed: dict[str, Any]) -> Request:
    fixed = {"precision": asked.precision.dtype, "gradients": asked.precision.gradients, **fixed}
    if asked.batch.microbatches is not None:
        fixed["microbatches"] = asked.batch.microbatches
    if asked.schedule is not None:
        fixed["schedule"] = asked.schedule
    if asked.memory.recompute != "none":
        fixed["recompute"] = tuple(asked.memory.recompute.split(","))
    usable = costs.cluster.usable_bytes(processes)
    return Request(
        devices=processes,
        batch_size=asked.batch.size,
        memory_bytes=usable if asked.memory.cap is None else min(float(asked.memory.cap), usable),
        fixed=fixed,
        forbidden=_UNMEASURED,
        optimizer=asked.optimizer.name,
        top=2 * MOST_PLANS,
        ends_alone=False,
        names=TRAIN,
    )


def memory_note(asked: TrainConfig, costs: CostModel, processes: int) -> str | None:
    """A line where the cap is above the memory that plans of this machine may use; None: it is not."""
    cap, usable = asked.memory.cap, costs.cluster.usable_bytes(processes)
    if cap is None or cap <= usable:
        return None
    return (
        f"memory: plans use at most {bytes_text(usable)} per process, what this machine has for each; --memory.cap is "
        "larger"
    )


def words_of(of: Configuration) -> str:
    """``pipeline 2 x data 2 (zero1) x tensor 2 with sequence, 1f1b, 4 micro-batches of 2, recompute full``."""
    degrees = {"pipeline": of.pipeline, "data": of.data, "tensor": of.inside.tensor, "expert": of.inside.expert}
    behind = {"data": f" ({of.strategy})", "tensor": " with sequence" if of.inside.sequence else ""}
    parts = [f"{name} {degree}{behind.get(name, '')}" for name, degree in degrees.items() if degree > 1]
    words = " x ".join(parts) or "one process"
    schedule = f", {of.schedule}{f' with {of.chunks} chunks' if of.chunks > 1 else ''}" if of.pipeline > 1 else ""
    plural = "es" if of.microbatches > 1 else ""
    kinds = sorted({str(of.recompute_of(stage)) for stage in range(of.stages)} - {str(Recompute.NONE)})
    again = f", recompute {' and '.join(kinds)}" if kinds else ""
    return f"{words}{schedule}, {of.microbatches} micro-batch{plural} of {of.microbatch_size}{again}"


def plan_of_checkpoint(asked: TrainConfig, saved: Mapping[str, Any]) -> TrainConfig | None:
    """`asked` with the plan of a checkpoint; None where it does not run on these processes, or with these options.

    Args:
        asked: the configuration, with ``parallel.auto``.
        saved: the configuration of the run that wrote the checkpoint, as a mapping.
    """
    mapping = asked.to_mapping()
    kept = {name: mapping["parallel"][name] for name in KEPT}
    try:
        mapping["parallel"] = {**saved["parallel"], **kept, "auto": False}
        mapping["schedule"] = saved["schedule"]
        mapping["batch"]["microbatches"] = saved["batch"]["microbatches"]
        mapping["memory"]["recompute"] = saved["memory"]["recompute"]
        config = replace(TrainConfig.from_mapping(mapping), processes=None, replan=False)
        validate_settings(config)
    except (PipeloomError, KeyError):
        return None
    return config if config.num_processes == asked.num_processes else None
