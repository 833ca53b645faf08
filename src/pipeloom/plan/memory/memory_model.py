"""`MemoryModel`: the layers of a model, and how they are trained, as memory forecasts need them. No torch."""

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel import Precision
from pipeloom.parallel.options import BUCKET_BYTES
from pipeloom.plan.memory.backward_bytes import BackwardMoment
from pipeloom.plan.memory.slice_bytes import SliceBytes


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer of a model.

    Attributes:
        name: fully qualified.
        parameters: shapes by canonical name; layers that name the same parameter share it.
        kept_bytes: for each kind of recomputation, bytes that F of one micro-batch keeps.
        buffer_elements: elements of buffers.
        is_block: whether it is one of the repeated layers: those that are recomputed, and whose matrices Muon updates.
        recompute_share: for each kind of recomputation, the share of the forward that is computed again.
        expert_parameters: the parameters that expert-parallel processes divide.
        slices: the bytes of a micro-batch that runs in slices; None: slices divide `kept_bytes`.
        forward_bytes: bytes at the end of F of one micro-batch, beside what it keeps.
        backward: moments of the backward of one micro-batch, in bytes beside what F kept.
        deferred_bytes: bytes that W of one micro-batch needs behind I, where they are more than F kept.
    """

    name: str
    parameters: Mapping[str, tuple[int, ...]]
    kept_bytes: Mapping[Recompute, float]
    buffer_elements: int = 0
    is_block: bool = False
    recompute_share: Mapping[Recompute, float]
    expert_parameters: frozenset[str] = frozenset()
    slices: SliceBytes | None = None
    forward_bytes: float = 0.0
    backward: Sequence[BackwardMoment] = ()
    deferred_bytes: float = 0.0

    def kept_in_slice(self, recompute: Recompute, index: int, count: int) -> float:
        """Bytes that F of slice `index` of `count` keeps, without keys and values."""
        if count == 1 or self.slices is None:
            return self.kept_bytes[recompute] / count
        return self.slices.of_slice(recompute, index, count)

    @cached_property
    def parameter_sizes(self) -> Mapping[str, int]:
        """Elements of each parameter, by canonical name."""
        return {name: math.prod(shape) for name, shape in self.parameters.items()}

    @cached_property
    def largest_parameters(self) -> tuple[int, int]:
        """Elements of its largest parameter, and of the largest one that is no expert's."""
        sizes, experts = self.parameter_sizes, self.expert_parameters
        return max(sizes.values(), default=0), max((n for name, n in sizes.items() if name not in experts), default=0)

    @cached_property
    def form(self) -> Hashable:
        """Its parameters without their names: layers of one form are laid out alike."""
        experts = self.expert_parameters
        return self.is_block, tuple((shape, name in experts) for name, shape in self.parameters.items())


def num_parameters(layers: Iterable[LayerMemory]) -> int:
    """Elements of the parameters of these layers; a shared parameter counts once."""
    return sum({name: size for layer in layers for name, size in layer.parameter_sizes.items()}.values())


def num_expert_parameters(layers: Iterable[LayerMemory]) -> int:
    """Elements of the parameters that expert-parallel processes divide."""
    return sum(layer.parameter_sizes[name] for layer in layers for name in layer.expert_parameters)


def in_stages(layers: list[LayerMemory], blocks: list[int]) -> list[list[LayerMemory]]:
    """Cut layers into stages with these numbers of blocks; other layers go with the first and the last block."""
    at = [index for index, layer in enumerate(layers) if layer.is_block]
    ends = (at[done] if done < len(at) else len(layers) for done in accumulate(blocks))
    return [layers[start:end] for start, end in pairwise([0, *ends])]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """The model whose memory is predicted.

    Attributes:
        stages: the layers of every stage.
        precision: number formats.
        optimizer: a name of `pipeloom.plan.memory.state_bytes.OPTIMIZERS`.
        recompute: the kind of recomputation of every stage; empty: none.
        whole_parameters: whether replicas own full parameters instead of shards (`pipeloom.DataParallel.layout`).
        elsewhere: the kinds of `KINDS` that are offloaded while they are not used.
        bucket_bytes: as in `pipeloom.DataParallel`.
        skip_bytes: by pair of stages, bytes per micro-batch of the values that skip stages between them.
        device: "cuda", or "cpu", where W computes gradients of weights in smaller groups.
        expert: expert-parallel degree: only 1 / `expert` of the replicas share the parameters of an expert.
    """

    stages: Sequence[Sequence[LayerMemory]]
    precision: Precision = field(default_factory=Precision)
    optimizer: str = "adamw"
    recompute: Sequence[Recompute] = ()
    whole_parameters: bool = False
    elsewhere: frozenset[str] = frozenset()
    bucket_bytes: int = BUCKET_BYTES
    device: str = "cuda"
    expert: int = 1
    skip_bytes: Mapping[tuple[int, int], float] = field(default_factory=dict)

    def recompute_of(self, stage: int) -> Recompute:
        return self.recompute[stage] if self.recompute else Recompute.NONE

    def kept_bytes(self, stage: int) -> float:
        """Bytes that F of one micro-batch keeps."""
        return sum(layer.kept_bytes[self.recompute_of(stage)] for layer in self.stages[stage])

    def slice_bytes(self, stage: int, count: int) -> tuple[float, float]:
        """Bytes of keys and values of a micro-batch in `count` slices, and of their gradients."""
        layers = [layer.slices for layer in self.stages[stage] if layer.slices is not None and count > 1]
        return sum(each.keys_values for each in layers), sum(each.at_end(count) for each in layers)

    def recompute_share(self, stage: int) -> float:
        """The share of the stage's blocks that is recomputed."""
        blocks = [layer.recompute_share[self.recompute_of(stage)] for layer in self.stages[stage] if layer.is_block]
        return sum(blocks) / len(blocks) if blocks else 0.0
