"""`StageBytes`: parameters of the stages of a transformer, and the bytes that their layers keep. No torch here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.configuration import Configuration
from pipeloom.plan.costs.software import Software
from pipeloom.plan.memory import LayerMemory, transformer_layers
from pipeloom.plan.memory.transformer_layers import kept_of_kinds
from pipeloom.split.chain_partition import consecutive

# Bytes that F keeps, by kind: of the embedding, of all blocks before each block, and of norm and head.
_Kept = tuple[Mapping[Recompute, float], Mapping[Recompute, list[float]], Mapping[Recompute, float]]


class _Elements(NamedTuple):
    """Parameters of the embedding; of norm and head; of a table that both read; of all blocks before each block."""

    first: float
    last: float
    tied: float
    before: list[float]


@dataclass(frozen=True)
class StageBytes:
    """Sizes of one transformer on one process of each stage, which are kept between calls.

    Attributes:
        model: its sizes.
        software: what computes.
    """

    model: Architecture
    software: Software
    _kept: dict[object, _Kept] = field(default_factory=dict, repr=False, compare=False)
    _elements: dict[InsideStage, _Elements] = field(default_factory=dict, repr=False, compare=False)
    _layers: dict[object, list[LayerMemory]] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _few(self) -> Architecture:
        """The model with blocks of each kind alone, which the others repeat."""
        return replace(self.model, layers=self.model.kinds)

    def layers(self, of: Configuration) -> list[list[LayerMemory]]:
        """The layers of every stage."""
        key = of.microbatch_size, of.element, of.inside, of.imbalance
        layers = self._layers.get(key)
        if layers is None:
            layers = self._layers[key] = transformer_layers(self.model, *key, self.software)
        found = consecutive(layers[1:-2], of.blocks_of(self.model.layers))
        found[0].insert(0, layers[0])
        found[-1] += layers[-2:]
        return found

    def _elements_of(self, of: Configuration) -> _Elements:
        found = self._elements.get(of.inside)
        if found is None:
            layers = transformer_layers(self._few, 1, of.element, of.inside)
            embedding, *kinds, norm, head = (float(sum(layer.parameter_sizes.values())) for layer in layers)
            by_kind = {self.model.has_experts(index): size for index, size in enumerate(kinds)}
            blocks = [by_kind[self.model.has_experts(index)] for index in range(self.model.layers)]
            tied = head if self.model.tie_embeddings else 0.0
            found = self._elements[of.inside] = _Elements(embedding, norm + head, tied, [0.0, *accumulate(blocks)])
        return found

    def parameters(self, of: Configuration) -> list[float]:
        """Elements of the parameters of every stage."""
        first, last, tied, before = self._elements_of(of)
        ends = list(accumulate(of.blocks_of(self.model.layers)))
        stages = [before[end] - before[start] for start, end in pairwise([0, *ends])]
        stages[0] += first
        stages[-1] += last if len(stages) > 1 else last - tied
        return stages

    def tied(self, of: Configuration) -> float:
        """Elements of a table that embedding and head read; 0 where each has its own."""
        return self._elements_of(of).tied

    def held(self, of: Configuration, sizes: Sequence[float], stages: Sequence[int]) -> float:
        """Elements of the parameters of a process with these stages, a shared one once; `sizes` are those of all."""
        total = sum(sizes[stage] for stage in stages)
        both = len(sizes) > 1 and 0 in stages and len(sizes) - 1 in stages
        return total - self.tied(of) if both else total

    def kept(self, of: Configuration) -> list[float]:
        """Bytes that F of one micro-batch keeps on every stage; of slices, in which keys and values are kept too."""
        sliced = of.slices > 1
        key = of.inside, of.microbatch_size, of.element, of.imbalance, sliced
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = self._kept_in_slices(of) if sliced else self._kept_whole(of)
        first, before, last = known
        kinds = [of.recompute] * of.stages if isinstance(of.recompute, Recompute) else of.recompute
        cuts = pairwise(accumulate(of.blocks_of(self.model.layers), initial=0))
        found = [before[kind][end] - before[kind][start] for kind, (start, end) in zip(kinds, cuts, strict=True)]
        found[0] += first[of.recompute_of(0)]
        found[-1] += last[of.recompute_of(0)]
        return found

    def _kept_whole(self, of: Configuration) -> _Kept:
        """Of whole micro-batches."""
        sizes = of.microbatch_size, of.element, of.inside, of.imbalance, self.software
        embedding, kinds, last = kept_of_kinds(self.model, *sizes)
        blocks = [kinds[self.model.has_experts(index)] for index in range(self.model.layers)]
        return dict.fromkeys(Recompute, embedding), _sums_before(blocks), dict.fromkeys(Recompute, last)

    def _kept_in_slices(self, of: Configuration) -> _Kept:
        sizes = of.microbatch_size, of.element, of.inside, of.imbalance, self.software
        embedding, *kinds, norm, head = map(_kept_in_slices, transformer_layers(self._few, *sizes))
        blocks = [kinds[index % len(kinds)] for index in range(self.model.layers)]
        return embedding, _sums_before(blocks), {kind: norm[kind] + head[kind] for kind in Recompute}


def _sums_before(blocks: Sequence[Mapping[Recompute, float]]) -> dict[Recompute, list[float]]:
    """By kind, bytes of all blocks before each block."""
    return {kind: [0.0, *accumulate(kept[kind] for kept in blocks)] for kind in Recompute}


def _kept_in_slices(layer: LayerMemory) -> Mapping[Recompute, float]:
    """Bytes that all slices of a micro-batch keep, at least: a recomputed block keeps keys and values."""
    kept = dict(layer.kept_bytes)
    if layer.slices is not None:
        kept[Recompute.FULL] += layer.slices.keys_values
    return kept
