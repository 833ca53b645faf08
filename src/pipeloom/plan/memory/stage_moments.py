"""The bytes of a stage inside its forwards and backwards: layer after layer activations go and gradients come.

A backward starts with all activations of its micro-batch and, if it is the first one, without gradients. It ends with
all gradients and without these activations. In between, at each layer,

    + gradients of the layers behind it, in the first backward; else of the whole stage
    - activations of the layers behind it
    + activations that are recomputed
    + what the layer's backward holds beside them (`pipeloom.plan.memory.backward_bytes`)

In the last backward before sums over replicas, the unit (`pipeloom.parallel.data`) whose gradients came last is being
reduced. I computes no gradient of a weight, and leaves for W what W needs.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.plan.memory.backward_bytes import BackwardMoment
from pipeloom.plan.memory.memory_model import MemoryModel
from pipeloom.plan.memory.state_bytes import NumberBytes

# Of gradients that W computes before it adds them, by device (`pipeloom.autograd.split_backward`).
_GROUP_ELEMENTS = {"cpu": 2**16, "cuda": 2**25}


class StageMoments(NamedTuple):
    """Bytes of a stage in one slice of one micro-batch. Peaks are beside all activations at the start.

    Attributes:
        kept: by F.
        waiting: from I to W.
        recomputed: at once.
        temporary: beside activations and gradients: of a forward, a backward, or I and W.
        forward: peak of F, with the activations that it keeps.
        first, later: peak of B, with the stage's gradients; the first B makes them.
        first_reducing, later_reducing: the same while sharded units are reduced.
        inputs: peak of I, without gradients.
        first_weights, later_weights: peak of W, with gradients.
    """

    kept: float
    waiting: float
    recomputed: float
    temporary: tuple[float, float, float]
    forward: float
    first: float
    later: float
    first_reducing: float
    later_reducing: float
    inputs: float
    first_weights: float
    later_weights: float


class StageGradients(NamedTuple):
    """Bytes of the gradients of a stage.

    Attributes:
        made: by layer, of the gradients that its backward completes.
        shared: by layer, of gradients of parameters that other layers read too: what these layers have computed waits,
            and the sum is made beside its terms.
        fixed: of all gradients during the whole backward, where they are reduced in it; None: see `made`.
        reducing: by layer, in the last backward: the sum of the unit being reduced, less what units before freed.
    """

    made: Sequence[float]
    shared: Sequence[float]
    fixed: float | None
    reducing: Sequence[float]


class _Most(NamedTuple):
    """The most bytes of a layer's backward beside activations and gradients, of any of its moments; at least 0.

    Attributes:
        size: without gradients.
        temporary: with those that are not added yet.
        first: with all that the backward has made, in the first one.
        later: with those that a later one has not added yet.
    """

    size: float
    temporary: float
    first: float
    later: float


@lru_cache(maxsize=4096)
def _most(
    backward: tuple[BackwardMoment, ...], count: int, number_bytes: tuple[int, int, int], *, in_place: bool
) -> _Most:
    """Of a slice of `count`; the bytes are those of a number in forwards, of another one beside it, and in sums."""
    single, another, gradient = number_bytes
    size = temporary = first = later = 0.0
    for moment in backward:
        beside, making = moment.size / count, single * moment.making + another * moment.summing
        size, temporary = max(size, beside), max(temporary, beside + making)
        first = max(first, beside + making + gradient * moment.made)
        later = max(later, beside + (0 if in_place and moment.grouped else making))
    return _Most(size, temporary, first, later)


def stage_moments(
    model: MemoryModel, stage: int, recompute: Recompute, index: int, count: int, gradients: StageGradients
) -> StageMoments:
    """The moments of slice `index` of `count` on a stage, with a kind of recomputation."""
    formats = NumberBytes.of(model.precision)
    single, another = formats.compute, formats.gradient if formats.gradient != formats.compute else 0
    layers, recomputes = model.stages[stage], recompute is not Recompute.NONE
    numbers = single, another, formats.gradient
    in_place = model.device == "cpu" and not another  # gradients of experts, but for the first
    of_layers = list(zip(layers, gradients.made, gradients.shared, gradients.reducing, strict=True))
    gone = made = waiting = again_most = 0.0
    first = later = first_reducing = later_reducing = inputs = forward = of_forward = temporary = 0.0
    for layer, gradient, shared, reducing in reversed(of_layers):
        kept = layer.kept_in_slice(recompute, index, count)
        again = layer.kept_in_slice(Recompute.NONE, index, count) - kept if recomputes else 0.0
        here, most = again - gone, _most(tuple(layer.backward), count, numbers, in_place=in_place)
        temporary = max(temporary, shared + most.temporary)
        inputs = max(inputs, here + waiting + most.size)
        first_here, later_here = here + shared + made + most.first, here + shared + most.later
        first, first_reducing = max(first, first_here), max(first_reducing, first_here + reducing)
        later, later_reducing = max(later, later_here), max(later_reducing, later_here + reducing)
        of_forward = max(of_forward, layer.forward_bytes / count)
        forward = max(forward, layer.forward_bytes / count - gone)
        again_most = max(again_most, again)
        gone += kept
        made += gradient
        waiting += max(kept, layer.deferred_bytes / count)
    fixed = gradients.fixed is not None
    full = made if gradients.fixed is None else gradients.fixed
    groups = []
    for largest in map(max, zip((0, 0), *(layer.largest_parameters for layer in layers), strict=True)):
        limit = _GROUP_ELEMENTS[model.device] + (largest if model.device == "cpu" else 0)
        groups.append(single * min(full / formats.gradient, limit))
    group, later_group = groups if in_place else groups[:1] * 2
    return StageMoments(
        kept=gone,
        waiting=waiting,
        recomputed=again_most,
        temporary=(of_forward, temporary, group),
        forward=forward,
        first=later + full if fixed else max(first, made - gone),
        later=later + full,
        first_reducing=later + full if fixed else max(first_reducing, made - gone),
        later_reducing=later_reducing + full,
        inputs=inputs,
        first_weights=full + group if fixed else max(group, made - waiting),
        later_weights=full + later_group,
    )
