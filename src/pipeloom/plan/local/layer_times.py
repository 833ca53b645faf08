"""`LayerTimes`: seconds of a model's own layers, measured on this machine. No torch here.

They replace the times of kernels where the same micro-batch was measured. Elsewhere the times of kernels are scaled by
what they are off at the nearest measured micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple, Self

Three = tuple[float, float, float]  # seconds of F, I and W, whose backwards run as a whole


class LayerSeconds(NamedTuple):
    """One micro-batch on one process with whole layers.

    Attributes:
        embedding, head: seconds; the head with the last norm and the loss.
        blocks: of blocks without experts (False) and with them (True).
        stage: of a stage beside its layers: what the runtime and autograd do once per computation.
        split, head_split: seconds of a split backward of a block, and of the head, over those of a whole one.
    """

    embedding: Three
    head: Three
    blocks: Mapping[bool, Three]
    stage: Three = (0.0, 0.0, 0.0)
    split: float = 1.0
    head_split: float = 1.0

    @classmethod
    def mean(cls, rows: Sequence[Self], weights: Sequence[float] | None = None) -> Self:
        """The mean of rows of the same layers."""

        def mean(column: Sequence[Three]) -> Three:
            return _three([fmean(values, weights) for values in zip(*column, strict=True)])

        return cls(
            mean([each.embedding for each in rows]),
            mean([each.head for each in rows]),
            {kind: mean([each.blocks[kind] for each in rows]) for kind in rows[0].blocks},
            mean([each.stage for each in rows]),
            fmean([each.split for each in rows], weights),
            fmean([each.head_split for each in rows], weights),
        )


@dataclass(frozen=True, kw_only=True)
class LayerTimes:
    """Layers of one model in one number format.

    Attributes:
        element: bytes of a number in forwards.
        rows: by samples per micro-batch, of the micro-batches of a step behind the first one.
        firsts: of the first one, whose layers find less of their data in caches; empty: as the others.
        update: seconds of an update over those of the machine's table.
        step_seconds: of a step beside its computations, messages and update.
        crowding: slowdown of processes that take turns, beside that each has a part of a core only; None: unknown.
    """

    element: int
    rows: Mapping[int, LayerSeconds] = field(default_factory=dict)
    firsts: Mapping[int, LayerSeconds] = field(default_factory=dict)
    update: float = 1.0
    step_seconds: float = 0.0
    crowding: float | None = None

    def nearest(self, samples: int, microbatches: int = 1) -> tuple[int, LayerSeconds]:
        """The measured micro-batch whose size is nearest, by ratio, and the mean of so many of them in a step."""
        found = min(self.rows, key=lambda each: (max(each, samples) / min(each, samples), each))
        row = self.rows[found]
        if found not in self.firsts:
            return found, row
        return found, LayerSeconds.mean([self.firsts[found], row], [1.0, microbatches - 1.0])

    def splits(self, samples: int) -> tuple[float, float]:
        """Seconds of a split backward over those of a whole one, of blocks and head, for micro-batches of `samples`."""
        if not self.rows:
            return 1.0, 1.0
        row = self.nearest(samples)[1]
        return max(1.0, row.split), max(1.0, row.head_split)

    def scaled(self, forward: float, backward: float, update: float) -> Self:
        """The times with forwards, backwards and the end of the step, updates included, this many times as long."""

        def times(three: Three) -> Three:
            return three[0] * forward, three[1] * backward, three[2] * backward

        def scaled(rows: Mapping[int, LayerSeconds]) -> dict[int, LayerSeconds]:
            return {
                samples: row._replace(
                    embedding=times(row.embedding),
                    head=times(row.head),
                    blocks={kind: times(block) for kind, block in row.blocks.items()},
                    stage=times(row.stage),
                )
                for samples, row in rows.items()
            }

        return replace(
            self,
            rows=scaled(self.rows),
            firsts=scaled(self.firsts),
            update=update * self.update,
            step_seconds=update * self.step_seconds,
        )

    def beside(self, crowded: "LayerTimes") -> Self:
        """The times with the crowding that `crowded` shows: the same layers, measured by more processes than cores."""
        ratios = [
            sum(map(sum, crowded.rows[samples].blocks.values())) / sum(map(sum, row.blocks.values()))
            for samples, row in self.rows.items()
            if samples in crowded.rows
        ]
        return replace(self, crowding=max(1.0, fmean(ratios)))

    def to_mapping(self) -> dict[str, Any]:
        """The times as a JSON object; `from_mapping` reads it back."""
        others = {name: getattr(self, name) for name in ("element", "update", "step_seconds", "crowding")}
        return {**others, "rows": _to_mapping(self.rows), "firsts": _to_mapping(self.firsts)}

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_mapping`."""
        tables = {name: _from_mapping(data.get(name, {})) for name in ("rows", "firsts")}
        return cls(**{**data, **tables})


def _to_mapping(rows: Mapping[int, LayerSeconds]) -> dict[str, Any]:
    return {
        str(samples): [row.embedding, row.head, [row.blocks.get(kind) for kind in (False, True)], *row[3:]]
        for samples, row in rows.items()
    }


def _from_mapping(rows: Mapping[str, Any]) -> dict[int, LayerSeconds]:
    return {
        int(samples): LayerSeconds(
            _three(embedding),
            _three(head),
            {bool(kind): _three(block) for kind, block in enumerate(blocks) if block is not None},
            _three(stage),
            *splits,
        )
        for samples, (embedding, head, blocks, stage, *splits) in rows.items()
    }


def _three(values: Sequence[float]) -> Three:
    forward, inputs, weights = values
    return forward, inputs, weights


def mean_layers(found: Sequence[LayerTimes]) -> LayerTimes:
    """The mean over processes that measured the same layers, of the micro-batch sizes that all have."""

    def mean(every: Sequence[Mapping[int, LayerSeconds]]) -> dict[int, LayerSeconds]:
        common = [samples for samples in every[0] if all(samples in rows for rows in every)]
        return {samples: LayerSeconds.mean([rows[samples] for rows in every]) for samples in common}

    return LayerTimes(
        element=found[0].element,
        rows=mean([each.rows for each in found]),
        firsts=mean([each.firsts for each in found]),
        update=fmean(each.update for each in found),
        step_seconds=fmean(each.step_seconds for each in found),
    )
