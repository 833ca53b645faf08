"""`OwnLoss`: the loss that a model of transformers computes from labels among its arguments."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.autograd.loss_metrics import Mean, zero_of
from pipeloom.engine.batch import Batch
from pipeloom.errors import InputError
from pipeloom.training.losses.labels import (
    NUM_ITEMS,
    MicroBatchLabels,
    check_given_once,
    check_tensors,
    declares_no_loss,
    is_label,
    num_samples_of,
)
from pipeloom.training.losses.loss_rule import LossRule
from pipeloom.training.losses.output_loss import is_scalar, loss_of_output, values_of
from pipeloom.training.losses.term_rules import Given, Rule
from pipeloom.transport.values import MicroBatches, samples_of, sizes_of

_IGNORED = -100
_TOLERANCE = 1e-3  # between a loss and the mean cross-entropy that it is, relative


class OwnLoss:
    """The loss in the output of a model that gets labels. The last stage gets them as keyword arguments.

    The loss is that of the batches of all replicas, however their labels are spread over micro-batches; for a mean over
    labels, a number `num_items_in_batch` in the batch, such as that of several batches between two updates, replaces
    theirs. A model that divides by `num_items_in_batch` gets its part of that number. The first forward of another
    model shows whether its loss is a mean over labels, all or all but the first of each sample, a mean over samples or
    a sum (`LossRule`); where it does not, `told` has a warning. Without "labels" (such as positions of answers), losses
    are means over samples.

    Args:
        model: the model.
        shows_labels: whether all stages get the labels among the arguments, since the forward may read them anywhere;
            else they do where it has no default for them.
    """

    joins_targets = True  # the engine passes the targets to the last stage

    def __init__(self, model: Any, *, shows_labels: bool = False) -> None:
        parameters = inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}
        self._names, self._first = frozenset(filter(is_label, parameters)), next(iter(parameters), "")
        empty = inspect.Parameter.empty
        self._shows_labels = shows_labels or any(parameters[name].default is empty for name in self._names)
        names = sorted(self._names)
        self._labels = names[0] if len(names) == 1 else "labels"
        if "targets" in names and "labels" not in names:  # beside others, such as class_labels
            self._labels = "targets"
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        function: Any = getattr(model, "loss_function", None)
        self._decodes = "decoder_input_ids" in parameters
        self._takes_number = NUM_ITEMS in parameters or (takes_any and function is not None)
        self._shared_shifts = getattr(function, "__name__", "") == "ForCausalLMLoss"
        self._rule = rule = LossRule(model)
        self.elements, self.compare_replicas = rule.elements, rule.compare_replicas  # see `LabelWeights`
        self.compare_halves: Callable[[nn.Module, Any, Any], None] | None = None
        self._model, self._takes_any = type(model).__name__, takes_any
        self.returns_no_loss = not self._names and declares_no_loss(model)

    def compare_with_halves(self) -> None:
        """Let the last stage run for halves of samples too, which needs stages that exchange nothing in a forward."""
        self.compare_halves = self._rule.compare_halves

    @property
    def takes_labels(self) -> bool:
        """Whether the model's forward has arguments for labels."""
        return bool(self._names)

    def separate(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        """Separate a batch into inputs and labels.

        Args:
            batch: a dict of the model's keyword arguments, or its first argument.
            targets: labels, or a dict of several kinds of labels; None: they are in the batch.

        Returns:
            The arguments without labels, and the labels with `num_items_in_batch` if it is there; None: no labels. A
            decoder that makes its input from labels has them among its arguments, too.
        """
        if isinstance(batch, MicroBatches) or isinstance(targets, MicroBatches):
            return self._separate_each(batch, targets)
        if targets is not None and not self._names and (self.returns_no_loss or not self._takes_any):
            raise InputError(
                f"targets are given, and the pipeline has no loss_fn: the forward of {self._model} takes no labels. "
                "Pass loss_fn to Pipeline, or the batch alone if the model computes a loss from it."
            )
        given = {} if targets is None else dict(targets) if isinstance(targets, Mapping) else {self._labels: targets}
        if isinstance(batch, Mapping):
            inputs = {}
            for name, value in batch.items():
                if is_label(name) or name == NUM_ITEMS:
                    check_given_once(name, value, given)
                    given.setdefault(name, value)
                else:
                    inputs[name] = value
            of_decoder = inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}
            if self._decodes and "labels" in given and not of_decoder:
                inputs["labels"] = given["labels"]  # every stage makes the decoder's input from them
            batch = inputs
        if self._shows_labels and batch is not None:
            named = batch if isinstance(batch, dict) else {self._first: batch}
            batch = {**named, **{name: value for name, value in given.items() if name in self._names}}
        number = given.get(NUM_ITEMS)
        if isinstance(number, Tensor):
            given[NUM_ITEMS] = number.item()
        given = {name: value for name, value in given.items() if value is not None}
        check_tensors({name: given[name] for name in self._names & given.keys()})
        return batch, given if any(isinstance(value, Tensor) for value in given.values()) else None

    def _separate_each(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        """Separate micro-batches; one of the two may be missing, on a process that does not read it."""
        number = len(batch if targets is None else targets)
        pairs = zip(batch or [None] * number, targets or [None] * number, strict=True)
        inputs, labels = zip(*(self.separate(*pair) for pair in pairs), strict=True)
        found = None if any(each is None for each in labels) else MicroBatches(labels)
        return None if batch is None else MicroBatches(inputs), found

    def needs_labels(self, inputs: Any) -> bool:
        """Whether a batch without labels cannot be used.

        The model takes some, and is not asked for a loss without; or it takes none and declares results without one.
        """
        asks = self._rule.contrasts = isinstance(inputs, Mapping) and bool(inputs.get("return_loss"))
        return not asks if self.takes_labels else self.returns_no_loss

    def missing(self) -> str:
        """The error about a batch without labels."""
        names = " or ".join(map(repr, sorted(self._names)))
        if not names:
            return (
                f"the pipeline has no loss_fn, and {self._model} takes no labels and returns no loss. Pass loss_fn to "
                "Pipeline, or a model with a head that computes a loss."
            )
        return (
            f"the batch has no labels, and the pipeline no loss_fn: the model computes its loss from {names}. Add them "
            "to the batch, or pass targets or loss_fn."
        )

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Labels of a replica that count: as they are, and shifted; see `pipeloom.engine.batch.LabelWeights`."""
        if not whole or not self._labelled(whole[0]):
            return 0, 0
        as_they_are, shifted = map(sum, zip(*self._counts(whole), strict=True))
        return as_they_are, shifted

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Add what a micro-batch's loss needs to its targets, so that its weighted loss is its part of the whole."""
        self._rule.begin_batch(in_parts=len(batch.weights) > 1)
        if not batch.targets or not self._labelled(batch.targets[0]):
            return
        number = batch.targets[0].get(NUM_ITEMS)
        numbers = [max(1, count) if number is None else number for count in counts]
        shifts = self._rule.rule is Rule.SHIFTED if self._rule.rule else self._shared_shifts
        passed = shifts if self._takes_number else None
        own, sizes = self._counts(whole), [len(each[self._labels]) for each in whole]
        is_even = all(
            part * batch.all_samples == count * size
            for each, size in zip(own, sizes, strict=True)
            for part, count in zip(each, counts, strict=True)
        )
        is_empty = number is None and not any(counts)
        batch.targets = [
            MicroBatchLabels(target, part, [each * weight for each in numbers], weight, passed, is_even, is_empty)
            for target, part, weight in zip(batch.targets, own, batch.weights, strict=True)
        ]

    def _labelled(self, target: Any) -> bool:
        return isinstance(target, Mapping) and self._labels in target

    def _counts(self, targets: Sequence[Any]) -> list[tuple[int, int]]:
        """Labels of each micro-batch that count: as they are, and without the first of each sample."""
        labels = [each[self._labels] for each in targets]
        shifted = [each[..., 1:] if each.dim() > 1 else each for each in labels]
        counted = torch.stack(
            [torch.stack([self._rule.counted(each).sum() for each in kind]) for kind in (labels, shifted)]
        )
        return list(zip(*counted.tolist(), strict=True))

    def watching(self) -> AbstractContextManager[None]:
        """Inside, the engine runs the forward of a micro-batch with its loss."""
        return self._rule.watching()

    def told(self) -> str | None:
        """The text about a loss that may be another than the model's, once."""
        return self._rule.told()

    def _rule_by_value(self, output: Any, loss: Tensor, labels: Any) -> Rule | None:
        """The rule of a loss that is the mean cross-entropy of logits in the output; None: it is not."""
        means = next(filter(None, (self._token_means(value, labels) for value in values_of(output))), None)
        if means is None or means[0] == means[1]:
            return None
        far = [abs(float(loss.detach()) - mean) for mean in means]
        rule = (Rule.LABELS, Rule.SHIFTED)[far[1] < far[0]]
        return rule if min(far) <= _TOLERANCE * abs(means[rule is Rule.SHIFTED]) else None

    @torch.no_grad()
    def _token_means(self, logits: Any, labels: Any) -> tuple[float, float] | None:
        """Mean cross-entropies of logits [B, S, V] and labels [B, S], as they are and shifted."""
        if not (isinstance(logits, Tensor) and isinstance(labels, Tensor) and logits.is_floating_point()):
            return None
        if logits.dim() != labels.dim() + 1 or logits.shape[:-1] != labels.shape or labels.dim() != 2:
            return None
        logits, labels = logits.detach().float(), labels.where(self._rule.counted(labels), _IGNORED).to(logits.device)
        as_they_are = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_IGNORED)
        shifted = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        means = float(as_they_are), float(shifted)
        return None if any(map(isnan, means)) else means

    def __call__(self, output: Any, targets: Any) -> dict[str, Any]:
        """The loss in the model's output, as the part of this micro-batch, and other scalars in it as metrics."""
        loss = loss_of_output(output)
        if loss is None and not isinstance(output, Mapping):
            raise InputError(
                f"the model returned a {type(output).__name__} without a loss: must be a dict with one under 'loss', "
                "or a tuple with one number. Pass loss_fn to Pipeline."
            )
        if loss is None:
            named = targets if isinstance(targets, Mapping) else ()
            names = ", ".join(repr(name) for name in named if name != NUM_ITEMS) or "this batch"
            raise InputError(
                f"the model returned no loss for {names}: it computes none from them. Pass loss_fn to Pipeline."
            )
        named = output if isinstance(output, Mapping) else {}
        scalars = {name: value for name, value in named.items() if name != "loss" and is_scalar(value)}
        if not isinstance(targets, MicroBatchLabels):
            self._rule.learn(loss, Given(None, may_add=False, num_samples=num_samples_of(targets)))
            return {"loss": loss, **scalars}
        labels = targets[self._labels]
        was_read, given = targets.number_was_read(), Given(labels, targets.is_even, num_samples=len(labels))
        by_value = partial(self._rule_by_value, output, loss, labels)
        self._rule.learn(loss, given, divided=was_read, by_value=by_value)
        rule = self._rule.rule
        if not was_read and rule in (Rule.SAMPLES, Rule.SUM):
            return {"loss": loss if rule is Rule.SAMPLES else loss / targets.weight, **scalars}
        shifts = rule is Rule.SHIFTED if rule else self._shared_shifts and (was_read or not self._decodes)
        count, number = targets.counts[shifts], targets.numbers[shifts]
        metrics = {name: Mean(value, count) for name, value in scalars.items()}
        if targets.is_empty:
            self._rule.tell_empty()
        if was_read:
            return {"loss": loss * ((targets.passed or number) / number), **metrics}
        if count == 0:  # the mean over no label is not a number
            others = [value for value in values_of(output) if not is_scalar(value)]
            return {"loss": zero_of(others), **metrics}
        return {"loss": loss * (count / number), **metrics}


def separated(loss_fn: Any, inputs: Any, targets: Any, *, needs_targets: bool) -> tuple[Any, Any]:
    """Inputs and targets of a batch that may hold the labels, where `loss_fn` is the model's own.

    Raises:
        InputError: there are no labels, and this process needs them.
    """
    inputs = plain_batch(inputs)
    if isinstance(loss_fn, OwnLoss):
        inputs, targets = loss_fn.separate(inputs, plain_batch(targets))
    if targets is None and needs_targets and loss_fn is not None:
        if not isinstance(loss_fn, OwnLoss):
            _check_has_targets(inputs)
        elif inputs is not None and loss_fn.needs_labels(inputs):
            raise InputError(loss_fn.missing())
        elif inputs is not None:
            targets = _samples_alone(inputs)
    elif needs_targets and isinstance(loss_fn, OwnLoss) and loss_fn.returns_no_loss:
        raise InputError(loss_fn.missing())
    return inputs, targets


def _samples_alone(inputs: Any) -> Any:
    """Targets [samples, 0] of a model that needs no labels: they say how many samples a micro-batch has."""
    if isinstance(inputs, MicroBatches):
        return MicroBatches(torch.empty(size, 0) for size in sizes_of(inputs, len(inputs), "inputs"))
    return torch.empty(samples_of(inputs, "inputs"), 0)


def _check_has_targets(inputs: Any) -> None:
    """Raises InputError for inputs that hold the targets, where a loss_fn needs these apart."""
    if isinstance(inputs, tuple | list) and len(inputs) == 2 and all(isinstance(each, Tensor) for each in inputs):
        raise InputError("targets=None: a batch of two tensors is passed as inputs. Call step(*batch).")
    label = next(filter(is_label, inputs), None) if isinstance(inputs, dict) else None
    if label is not None:
        raise InputError(
            f"targets=None: loss_fn gets targets apart from the inputs, which hold {label!r}. Pass both, as in "
            f"step(batch, batch[{label!r}])."
        )


def plain_batch(batch: Any) -> Any:
    """A batch as the ecosystem makes it, such as a `BatchEncoding`, as a dict of its values."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch
