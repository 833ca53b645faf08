"""`PlanTimes`: where the time of a step goes, as a plan predicts it and as a run measures it. No torch here."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pipeloom.common.quantities import seconds_text
from pipeloom.ir import Op
from pipeloom.sim import Timeline

_BACKWARDS = (Op.B, Op.I, Op.W)


@dataclass(frozen=True, kw_only=True)
class PlanTimes:
    """Seconds of a step; None where they are not known.

    Attributes:
        step: from its beginning to the end of the update.
        forward, backward: of one micro-batch on all stages.
        waits: in which a rank computes nothing before the last computation ends; mean of the ranks.
        update: the rest: sums over processes, and the update.
    """

    step: float
    forward: float | None = None
    backward: float | None = None
    waits: float | None = None
    update: float | None = None

    @classmethod
    def predicted(cls, timeline: Timeline, step: float) -> "PlanTimes":
        """The times of a simulated step that takes `step` seconds, its update included."""
        found: dict[Op, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for spans in timeline.compute_spans:
            for action, start, end in spans:
                found[action.op][action.stage].append(end - start)
        stages = {op: sum(map(median, by_stage.values())) for op, by_stage in found.items()}
        return cls(
            step=step,
            forward=stages.get(Op.F, 0.0),
            backward=sum(stages.get(op, 0.0) for op in _BACKWARDS),
            waits=timeline.bubble_fraction * timeline.makespan,
            update=step - timeline.makespan,
        )

    @classmethod
    def measured(
        cls, step: float, bubble_fraction: float, stages: Sequence[Sequence[float]], *, work: float
    ) -> "PlanTimes":
        """The times of steps that a run made.

        Args:
            step: median seconds.
            bubble_fraction: median, of the time up to the end of the last computation.
            stages: for each stage, seconds of F, B, I and W of a micro-batch.
            work: micro-batches that a rank computes on each of its stages, over the number of ranks.
        """
        forward = sum(row[0] for row in stages)
        backward = sum(sum(row[1:]) for row in stages)
        busy = work * (forward + backward)
        makespan = min(step, busy / max(1e-9, 1 - bubble_fraction))
        return cls(step=step, forward=forward, backward=backward, waits=makespan - busy, update=step - makespan)

    def beside(self, predicted: "PlanTimes") -> str:
        """``step 52 ms (predicted 48 ms, 8% too low), forward ...``: these times beside predicted ones."""
        pairs = [(name, value, getattr(predicted, name)) for name, value in asdict(self).items()]
        return ", ".join(
            f"{name} {seconds_text(value)} (predicted {seconds_text(guess)}, {abs(guess / value - 1):.0%} too "
            f"{'low' if guess < value else 'high'})"
            if name == "step"
            else f"{name} {seconds_text(value)} ({seconds_text(guess)})"
            for name, value, guess in pairs
            if value is not None and guess is not None
        )

    def to_mapping(self) -> dict[str, Any]:
        """The times as a JSON object."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> "PlanTimes":
        """The inverse of `to_mapping`."""
        return cls(**data)
