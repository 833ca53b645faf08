"""`SampleHalves`: how the loss of a micro-batch follows from its samples, by its values for two halves of them.

Whatever a loss_fn calls, its values and gradients show whether it is a mean over samples or over labels, a sum, or none
of these.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.autograd.loss_metrics import counts_of_labels, loss_in
from pipeloom.training.losses.element_means import Means, UnequalMeans, means_of
from pipeloom.training.losses.labels import labels_of
from pipeloom.training.losses.reductions import Reductions
from pipeloom.transport.values import Value, flatten, unflatten, with_form

_NEAR, _NUM_EPS = 1e-5, 2  # between numbers that are equal: relative, and in units of the rounding
_FAR, _MOST = 20, 0.2  # times as far, but no more than this, are numbers that differ
_NUM_ASKED = 4  # micro-batches
_FEW = 4  # samples of a micro-batch that has no halves of at least two, as a standard deviation needs
# Bytes of the output of a micro-batch. What a comparison takes is memory that no forecast knows: two micro-batches that
# are joined, and copies, have to be small; of a large micro-batch, few samples are enough.
_MOST_BYTES, _FEW_BYTES = 2**26, 2**18
# Of the output of samples whose gradients are compared, which takes several times as much: at first, when a new run has
# no optimizer states yet, and later.
_FIRST_GRADIENT_BYTES, _GRADIENT_BYTES = 2**22, 2**16
# Between gradients that are equal: relative to their norm, and in units of the rounding.
_GRADIENTS_NEAR, _GRADIENTS_EPS = 1e-3, 20
_PIECES = 8  # in which gradients are compared, as numbers of twice the size
_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "c10d_functional"})

Gradients = list[Tensor | None]
"""Of a loss, with respect to values [samples, ...]; None: it does not depend on the value."""


class CannotAskError(Exception):
    """The loss draws random numbers, exchanges messages, changes a state, or takes no part of the samples."""


class RefusingEffects(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises before a random number is drawn, a message is sent, or a tensor from outside is changed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._own = set[int]()  # storages that were made inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES or torch.Tag.nondeterministic_seeded in func.tags:
            raise CannotAskError(func.name())
        names = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
        if not _storages([given.get(name) for name in names]) <= self._own:
            raise CannotAskError(func.name())
        result = func(*args, **kwargs)
        self._own |= _storages(result) - (_storages((args, kwargs)) - self._own)
        return result


def _storages(value: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(value) if isinstance(each, Tensor)}


class SampleHalves:
    """Compares the loss of a micro-batch with those of the halves of its samples.

    Of micro-batches with a large output, the first samples are compared. Of micro-batches of few samples two are
    compared, as the halves of both. The function may change small tensors: it gets
    copies. Micro-batches with an output of more than 64 MiB, of few samples 256 KiB, are not compared.

    Args:
        loss_fn: ``loss_fn(output, targets)``.
        ignored: the label that does not count.
        weigh: what the targets of samples weigh in the mean that `loss_fn` is said to be; None: nothing is said.
    """

    def __init__(
        self, loss_fn: Callable[[Any, Any], Any], ignored: int, weigh: Callable[[Value], float] | None = None
    ) -> None:
        self._loss_fn, self._ignored, self._weigh = loss_fn, ignored, weigh
        self._before: tuple[Value, Value, float] | None = None  # a micro-batch of few samples, and its loss
        self._left = _NUM_ASKED
        self._has_compared, self._differed = False, False  # gradients; whether they alone differed before

    @torch.no_grad()
    def ask(self, output: Value, targets: Value, loss: Tensor, *, knows_means: bool) -> str | None:
        """The text about a loss that is no mean over samples; None: it is one, or this micro-batch does not tell.

        Args:
            output, targets: of a micro-batch. All tensors with dimensions have the samples along dimension 0.
            loss: of the micro-batch.
            knows_means: whether a loss that is seen to be a mean over some elements is reported elsewhere.

        Raises:
            CannotAskError: no micro-batch will tell, or enough were asked.
        """
        if not self._left:
            self._before = None
            raise CannotAskError("enough were asked")
        self._left -= 1
        try:
            with RefusingEffects():
                return self._compare(output, targets, loss, knows_means)
        except CannotAskError:
            raise
        except Exception as error:  # whatever a function raises for other samples than it expects
            raise CannotAskError(str(error)) from error

    def _compare(self, output: Value, targets: Value, loss: Tensor, knows_means: bool) -> str | None:
        num_samples, given = _num_samples(targets), float(loss)
        again, value = range(num_samples), given  # samples whose loss is known; it is evaluated once more
        if num_samples < _FEW and _num_bytes(output) <= _FEW_BYTES:
            before, self._before = self._before, None
            if before is None:
                self._before = _some(output, again, num_samples), _some(targets, again, num_samples), given
                return None
            first = _num_samples(before[1])
            output, targets = (
                _joined(one, _some(other, again, num_samples))
                for one, other in zip(before[:2], (output, targets), strict=True)
            )
            halves, num_samples = (range(first), range(first, first + num_samples)), first + num_samples
            again, values, value = halves[1], [before[2], given], self._evaluate(output, targets, range(num_samples))
        elif num_samples >= _FEW and _num_bytes(output) <= _MOST_BYTES:
            enough = max(_FEW, num_samples * _FEW_BYTES // max(1, _num_bytes(output)))
            if enough < num_samples:
                again = range(enough)
                value = given = self._evaluate(output, targets, again)
            halves = again[: len(again) // 2], again[len(again) // 2 :]
            values = [self._evaluate(output, targets, half) for half in halves]
        else:
            raise CannotAskError("a large output")
        scale = max(map(abs, (value, *values)))
        if not scale or not all(map(math.isfinite, (value, *values))):
            return None
        near = max(_NEAR, _NUM_EPS * _rounding(output, loss))
        near, far = scale * near, scale * min(_FAR * near, _MOST)
        weights: list[Sequence[float]] = [[len(half) for half in halves]]
        labels = labels_of(targets)
        if self._weigh is not None:
            weights = [[self._weigh(_some(targets, half, num_samples)) for half in halves]]
        elif labels is not None:
            weights.append(counts_of_labels([labels[list(half)] for half in halves], self._ignored))
        weights = [each for each in weights if any(each)]
        from_means = [abs(value - _mean(values, each)) for each in weights]
        from_sum = abs(value - sum(values))
        if min(from_means) <= near:
            fits = [each for each, distance in zip(weights, from_means, strict=True) if distance <= near]
            combine = self._gradients_combine(output, targets, halves, fits)
            differed, self._differed = self._differed, not combine
            if combine or not differed:  # halves with losses that are nearly equal hide a function that is not linear
                return None
            return (
                "loss_fn gives samples gradients that depend on other samples, such as by a detached loss as a factor: "
                "the pipeline trains with those of the micro-batches' losses, and those of the whole batch are others. "
                "Let loss_fn be a mean over samples that do not depend on each other."
            )
        if min(from_means) <= far or near < from_sum <= far:
            return None
        if abs(self._evaluate(output, targets, again) - given) > near:
            raise CannotAskError("another value for the same samples")
        number = num_samples if halves[-1] == again else len(again)
        text = f"{value:.6g} for {number} samples, {values[0]:.6g} and {values[1]:.6g} for their halves"
        if self._weigh is not None:
            return (
                f"mean_over_labels gets a loss_fn that is no mean over the labels that count, {text}: the loss of the "
                "whole batch is another. Pass the weights of its elements as counts, such as counts=lambda targets: "
                "w[targets] for class weights w."
            )
        if from_sum <= near:
            return (
                f"loss_fn is a sum over samples, {text}: the pipeline trains the mean of the micro-batches' sums. For "
                "the mean over samples, divide the loss by their number in loss_fn. For the sum over the batch, "
                "multiply that mean by the number of samples of the whole batch."
            )
        if knows_means and self._has_unequal_means(output, targets, halves):
            return None
        return (
            f"loss_fn is neither a mean nor a sum over samples, {text}: the pipeline trains the mean of the "
            "micro-batches' losses, and the loss of the whole batch is another. Let loss_fn be a mean over samples "
            "that do not depend on each other; for a mean over some elements, pass "
            "loss_fn=pipeloom.mean_over_labels(loss_fn, counts=lambda targets: ...), with their mask or weights, such "
            "as w[targets] for class weights w."
        )

    def _evaluate(self, output: Value, targets: Value, samples: Sequence[int]) -> float:
        num = _num_samples(targets)
        return float(loss_in(self._loss_fn(_some(output, samples, num), _some(targets, samples, num))))

    @torch.enable_grad()
    def _gradients_combine(
        self, output: Value, targets: Value, halves: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]
    ) -> bool:
        """Whether gradients with respect to the output are those of the halves, with one of these weights.

        Also True for large outputs, which are not compared.
        """
        num_samples, found = _num_samples(targets), list[Gradients]()
        whole = range(halves[0][0], halves[-1][-1] + 1)
        most = _GRADIENT_BYTES if self._has_compared and not self._differed else _FIRST_GRADIENT_BYTES
        self._has_compared = True
        if _num_bytes(output) * len(whole) > most * num_samples:
            return True
        for samples in (whole, *halves):
            layout, values = flatten(_some(output, samples, num_samples, with_graph=True))
            # Hooks of the step, which offload or count, are not for these graphs.
            with saved_tensors_hooks(torch.Tensor.detach, lambda saved: saved):
                given = with_form(unflatten(layout, [each.clone() for each in values]), output)  # it may change them
                loss = loss_in(self._loss_fn(given, _some(targets, samples, num_samples)))
            del given
            found.append(gradients_of(loss, [each for each in values if each.dim()]))
        shares = ([number / sum(each) for number in each] for each in weights)
        return any(gradients_combine(found[0], found[1:], each) for each in shares)

    @torch.enable_grad()
    def _has_unequal_means(self, output: Value, targets: Value, halves: Sequence[Sequence[int]]) -> bool:
        """Whether the loss is seen to be a mean over elements of which halves have different numbers per sample."""
        num_samples, unequal, found = _num_samples(targets), UnequalMeans(), None
        for half in halves:
            given = _some(output, half, num_samples, with_graph=True), _some(targets, half, num_samples)
            with Reductions() as seen:
                loss = loss_in(self._loss_fn(*given))
            means = without_labels(means_of(loss, seen, len(half)), given[1], self._ignored)
            found = unequal.compare(means, len(half), [len(half)])
        return found is not None


def without_labels(means: Means, targets: Value, ignored: int) -> Means:
    """The terms of a loss that are no means over the labels in its targets, which are counted otherwise."""
    if labels_of(targets) is None:
        return means
    return means._replace(terms=tuple(each for each in means.terms if each.ignored != ignored))


def _num_samples(targets: Value) -> int:
    found = next((len(each) for each in flatten(targets)[1] if each.dim()), 0)
    if not found:
        raise CannotAskError("targets without samples")
    return found


def _joined(one: Value, other: Value) -> Value:
    """The samples of two values; numbers without dimensions are those of the first."""
    layout, tensors = flatten(one)
    pairs = zip(tensors, flatten(other)[1], strict=True)
    return with_form(unflatten(layout, [torch.cat(pair) if pair[0].dim() else pair[0] for pair in pairs]), one)


def _num_bytes(value: Value) -> int:
    return sum(each.numel() * each.element_size() for each in flatten(value)[1])


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _rounding(output: Value, loss: Tensor) -> float:
    """The coarsest rounding of the numbers of which a loss is made, relative."""
    return max(torch.finfo(each.dtype).eps for each in (loss, *flatten(output)[1]) if each.is_floating_point())


def _some(value: Value, samples: Sequence[int], num_samples: int, *, with_graph: bool = False) -> Value:
    """These samples, one after another, of a value: a copy where they are small and have no graph."""
    layout, tensors = flatten(value)
    some = []
    for tensor in tensors:
        if type(tensor) not in (Tensor, nn.Parameter) or (tensor.dim() and len(tensor) != num_samples):
            raise CannotAskError(f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}")
        part = tensor.detach()[samples[0] : samples[-1] + 1] if tensor.dim() else tensor.detach()
        part = part.clone() if part.nbytes <= _FEW_BYTES and not with_graph else part
        some.append(part.requires_grad_(with_graph and part.is_floating_point()))
    return with_form(unflatten(layout, some), value)


# Gradients: the value of ``loss / loss.detach()`` is 1 for any samples, and so is the mean of those of its halves.


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> Gradients:
    """The gradients of a loss with respect to values; its graph is used up."""
    asked = [each for each in values if each.requires_grad]
    if not asked or loss.grad_fn is None:
        return [None] * len(values)
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True))
    return [next(found) if each.requires_grad else None for each in values]


@torch.no_grad()
def gradients_combine(whole: Gradients, parts: Sequence[Gradients], weights: Sequence[float]) -> bool:
    """Whether the gradients of a loss are those of the losses of its samples' parts with these weights.

    Args:
        whole, parts: gradients with respect to values of all samples, and of consecutive parts of them.
        weights: of the losses of the parts.
    """
    for gradient, *of_parts in zip(whole, *parts, strict=True):
        if gradient is None or any(each is None for each in of_parts):
            continue
        given = [each for each in of_parts if each is not None]
        square = differences = 0.0
        for own, part, weight in zip(gradient.split([len(each) for each in given]), given, weights, strict=True):
            for some, same in zip(own.chunk(_PIECES), part.chunk(_PIECES), strict=True):
                square += float(some.double().square().sum())
                differences += float((same.double() * weight - some).square().sum())
        near = max(_GRADIENTS_NEAR, _GRADIENTS_EPS * torch.finfo(gradient.dtype).eps)
        if math.isfinite(square) and differences > near**2 * square:
            return False
    return True
