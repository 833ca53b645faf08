"""`StageHalves`: the losses of two halves of a micro-batch's samples, of a model that computes its own loss.

The last stage runs again for each half. Whatever functions make the loss, its values and its gradients with respect to
the model's other results show how losses combine.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.training.losses.element_means import UnequalMeans, means_of
from pipeloom.training.losses.output_loss import loss_of_output
from pipeloom.training.losses.reductions import Reductions
from pipeloom.training.losses.sample_halves import (
    CannotAskError,
    Gradients,
    RefusingEffects,
    gradients_combine,
    gradients_of,
)

_NEAR = 1e-4  # between numbers that are equal, relative
_NUM_ASKED = 4  # micro-batches
_MOST_BYTES = 2**24  # of the output of a micro-batch that runs again: what its graph keeps is in no forecast


class HalfLosses(NamedTuple):
    """The loss of a micro-batch, and those of its first `middle` samples and of the others.

    `gradients`: of each, with respect to results with samples. `means_differ`: whether it is seen to be a mean over
    elements of which halves have different numbers per sample.
    """

    value: float
    halves: tuple[float, float]
    gradients: tuple[Gradients, Gradients, Gradients]
    middle: int
    num_samples: int
    means_differ: bool

    def text(self) -> str:
        """The numbers in words."""
        first, second = self.halves
        return f"{self.value:.6g} for {self.num_samples} samples, {first:.6g} and {second:.6g} for their halves"

    def combine_to(self, weights: tuple[float, float]) -> bool:
        """Whether the loss is the sum of those of the halves with these weights."""
        found = sum(value * weight for value, weight in zip(self.halves, weights, strict=True))
        return abs(found - self.value) <= _NEAR * max(map(abs, (self.value, *self.halves)))

    def gradients_combine_to(self, weights: tuple[float, float]) -> bool:
        """Whether its gradients are those of the halves with these weights."""
        whole, *halves = self.gradients
        return gradients_combine(whole, halves, weights)


class StageHalves:
    """Runs the last stage for halves of the first micro-batches."""

    def __init__(self) -> None:
        self._left = _NUM_ASKED

    def ask(self, stage: nn.Module, value: Any, output: Any, num_samples: int) -> HalfLosses | None:
        """The losses of the halves; None: this micro-batch does not tell.

        Args:
            stage: the last one.
            value, output: what it got and returned.
            num_samples: of the micro-batch.

        Raises:
            CannotAskError: no micro-batch will tell. The stage draws random numbers, exchanges messages or changes
                buffers, does not run on halves, or computes a sample otherwise beside others; or enough were asked.
        """
        if num_samples < 2:
            return None
        own = _tensors(output)
        self._left -= 1
        if self._left < 0 or sum(each.nbytes for each in own) > _MOST_BYTES:
            raise CannotAskError("enough were asked, or a large output")
        if any(not each.dim() for each in tree_leaves(value) if isinstance(each, Tensor)):
            raise CannotAskError("a number that may count samples")
        middle, whole = num_samples // 2, _loss_in(output).item()
        losses, gradients, unequal, texts = [], list[Gradients](), UnequalMeans(), []
        for samples in (slice(0, middle), slice(middle, num_samples), slice(0, num_samples)):
            number = samples.stop - samples.start
            with Reductions() as seen:
                found = _run(stage, tree_map_only(Tensor, _cut(samples, num_samples), value))
            _check_same(own, found, samples, num_samples)
            loss = _loss_in(found)
            gradients.append(_gradients_of(loss, [each for each in _tensors(found) if _has_samples(each, number)]))
            losses.append(loss.item())
            texts.append(unequal.compare(means_of(loss, seen, number), number, [number]))
        first, second, again = losses
        if not all(map(math.isfinite, (whole, *losses))):
            return None
        if abs(again - whole) > _NEAR * abs(whole):
            raise CannotAskError("another loss for the same samples")
        by_sample = gradients[2], gradients[0], gradients[1]
        return HalfLosses(whole, (first, second), by_sample, middle, num_samples, any(texts))


def _run(stage: nn.Module, value: Any) -> Any:
    seeded = getattr(stage, "seeded", None)
    value = value if seeded is None else seeded(value)
    try:
        with torch.enable_grad(), _attributes_kept(stage), RefusingEffects():
            return stage(value)
    except CannotAskError:
        raise
    except Exception as error:  # whatever a stage raises for other samples than it expects
        raise CannotAskError(str(error)) from error


def _gradients_of(loss: Tensor, values: list[Tensor]) -> Gradients:
    try:
        return gradients_of(loss, values)
    except Exception as error:  # such as of reentrant checkpoints, which torch.autograd.grad does not run
        raise CannotAskError(str(error)) from error


def _cut(samples: slice, num_samples: int) -> Callable[[Tensor], Tensor]:
    return lambda each: each.detach()[samples].clone() if len(each) == num_samples else each.detach().clone()


def _loss_in(output: Any) -> Tensor:
    loss = loss_of_output(output)
    if loss is None:
        raise CannotAskError("no loss")
    return loss


@torch.no_grad()
def _check_same(whole: list[Tensor], output: Any, samples: slice, num_samples: int) -> None:
    """Raises CannotAskError unless results of these samples are those that they have beside the others."""
    some = _tensors(output)
    pairs = [(one[samples], other) for one, other in zip(whole, some, strict=False) if _has_samples(one, num_samples)]
    if not pairs or len(whole) != len(some):
        raise CannotAskError("no results of single samples")
    for one, other in pairs:
        if one.shape != other.shape or not torch.allclose(one, other, rtol=_NEAR, atol=_NEAR * float(one.abs().max())):
            raise CannotAskError("other results for the same samples")


def _tensors(value: Any) -> list[Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _has_samples(value: Tensor, num_samples: int) -> bool:
    return value.dim() > 0 and len(value) == num_samples and value.is_floating_point()


@contextmanager
def _attributes_kept(stage: nn.Module) -> Iterator[None]:
    """Inside, attributes that a forward sets on modules are set for a while."""
    whole = getattr(stage, "whole_model", None)
    modules = [*stage.modules(), *(() if whole is None else whole.modules())]
    before = [(vars(each), dict(vars(each))) for each in modules]
    try:
        yield
    finally:
        for now, earlier in before:
            if now.keys() != earlier.keys() or any(now[name] is not value for name, value in earlier.items()):
                now.clear()
                now.update(earlier)
