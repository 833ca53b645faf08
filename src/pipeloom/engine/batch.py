"""`Batch`: the inputs and results of one step, cut into micro-batches."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from pipeloom.autograd.auxiliary_losses import DeclaredLoss, ObservedQuantity
from pipeloom.autograd.loss_metrics import Metric
from pipeloom.devices import Device
from pipeloom.errors import InputError
from pipeloom.transport.values import MicroBatches, Value, flatten, sizes_of, split_batch, tensors_in, unflatten


class Extent(NamedTuple):
    """A slice: tokens `start` to `end` of a sequence of `length`."""

    start: int
    end: int
    length: int


ForwardKey = tuple[int, int, int | None]  # one F: stage, micro-batch, slice


class Declared(NamedTuple):
    """What one F of a stage declared.

    Attributes:
        samples: samples of its micro-batch; of a slice, its part of them. 0 where only the loss declared something.
        losses: auxiliary losses, without graphs.
        observed: other quantities.
        metrics: of the last stage, metrics beside the loss.
    """

    samples: float = 0.0
    losses: Sequence[DeclaredLoss] = ()
    observed: Sequence[ObservedQuantity] = ()
    metrics: Mapping[str, Metric] = MappingProxyType({})


@dataclass
class Batch:
    """The inputs and results of one step, apart from messages.

    Attributes:
        inputs: inputs of each micro-batch, on ranks with the first stage.
        targets: targets of each micro-batch, on ranks with the last stage; None where no loss is computed.
        sizes: samples of each micro-batch, on ranks with the last stage.
        weights: the share of each micro-batch in the loss, which is the mean over the batches of all replicas.
        losses: losses of the micro-batches whose last stage ran here, each times its weight; of slices, their sum.
        outputs: outputs of the last stage, where no loss is computed; of slices, a list until all are there.
        num_samples: samples of the batch; 0 where this process reads neither inputs nor targets.
        num_microbatches: of the batch; 0 where this process does not know it yet.
        all_samples: samples of the batches of all replicas; 0 where this process does not know it yet.
        collects: whether auxiliary losses and observed quantities are collected.
        declared: these and the metrics, by stage, micro-batch and slice, of the forwards that ran here.
        metric_kinds: by name of the metrics beside the loss, whether it is a sum; None: no loss was computed yet.
        extents: extents of the slices, on ranks that read inputs or targets; other ranks receive them with each value.
        seed: seed of the dropout masks of slices; None: a stage draws one where it needs it.
        forms: of inputs and targets (see `form_of`); empty where this process does not read the batch.
    """

    inputs: Sequence[Value] = ()
    targets: Sequence[Value] | None = None
    sizes: Sequence[int] = ()
    weights: Sequence[float] = ()
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Value] = field(default_factory=dict)
    num_samples: int = 0
    num_microbatches: int = 0
    all_samples: int = 0
    collects: bool = False
    declared: dict[ForwardKey, Declared] = field(default_factory=dict)
    metric_kinds: Mapping[str, bool] | None = None
    extents: Sequence[Extent] = ()
    seed: int | None = None
    forms: tuple[str, str] = ("", "")

    @classmethod
    def cut(
        cls, num_microbatches: int, inputs: Value, targets: Value, *, needs_inputs: bool, needs_targets: bool
    ) -> Self:
        """Cut the batch into micro-batches, as far as this process reads it; `weigh` sets the weights.

        Raises:
            InputError: inputs or targets are missing, too short, of different lengths, or have a graph.
        """
        batch = cls()
        if needs_inputs:
            batch.inputs, sizes = _cut(inputs, num_microbatches, "inputs", "first")
            batch.num_samples, batch.num_microbatches = sum(sizes), num_microbatches
        if needs_targets:
            batch.targets, sizes = _cut(targets, num_microbatches, "targets", "last")
            if needs_inputs and sum(sizes) != batch.num_samples:
                raise InputError(sample_mismatch(batch.num_samples, sum(sizes)))
            batch.num_samples, batch.num_microbatches, batch.sizes = sum(sizes), num_microbatches, sizes
        return batch

    def weigh(self, all_samples: int) -> None:
        """Set the weights for a batch of `all_samples` samples over all replicas."""
        self.all_samples = all_samples
        self.weights = [size / all_samples for size in self.sizes]


def _cut(value: Value, num_microbatches: int, what: str, where: str) -> tuple[list[Value], list[int]]:
    if value is None:
        raise InputError(f"{what}=None: the rank with the {where} stage reads them. Pass the batch.")
    if isinstance(value, MicroBatches):
        return list(value), sizes_of(value, num_microbatches, what)
    pieces = split_batch(value, num_microbatches, what)
    if torch.is_grad_enabled() and any(tensor.grad_fn is not None for tensor in flatten(value)[1]):
        raise InputError(
            f"{what} require gradients: a step does not continue the backward beyond its batch. Pass {what}.detach()."
        )
    return pieces


def sample_mismatch(inputs: int, targets: int) -> str:
    """The error text for inputs and targets with different numbers of samples."""
    fix = "Pass inputs and targets of the same batch, on every process."
    if targets > inputs:
        fix += (
            " Of targets of selected elements, such as masked patches, pass all [samples, ...], and select in loss_fn."
        )
    return f"inputs have {inputs} samples and targets {targets}: every sample needs a target. {fix}"


class LabelWeights(Protocol):
    """What a loss_fn, or the targets of a batch, may have: labels count over all micro-batches and replicas.

    It may also have `elements`, called before `count`: two numbers of the last batch, added up over replicas, too.
    Where one of them is not 0, `compare_replicas` gets them and their sums.
    """

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Two numbers that are added up over replicas, such as labels of this replica, and those that count.

        Args:
            whole: targets of its micro-batches, with whole sequences.
        """

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Replace the targets of a batch with its weights, from these `counts` of all replicas."""


def moved(value: Value, device: Device) -> Value:
    """A micro-batch on `device`; a dict of a class of its own stays one, with its attributes."""
    layout, tensors = flatten(value)
    if not tensors:
        return value
    found = unflatten(layout, device.upload(tensors))
    if type(value) is dict or not isinstance(value, dict):
        return found
    kept = copy(value)
    kept.update(found)
    return kept


def prepared(loss_fn: Any, targets: Value) -> Value:
    """The targets of a full batch as `loss_fn` wants them, before the batch is cut."""
    prepare = getattr(loss_fn, "prepare", None)
    return targets if prepare is None or targets is None else prepare(targets)


def label_weights(loss_fn: Any, targets: Value) -> LabelWeights | None:
    """What weighs the labels of a batch with these prepared targets; None: nothing does."""
    return next((each for each in (targets, loss_fn) if hasattr(each, "weigh")), None)


def form_of(value: Value) -> str:
    """The form in words, such as "int64 [samples, 16]"; empty for None, and for tensors without elements.

    Of constants it has the types. Keys of dicts are in alphabetical order.
    """
    if isinstance(value, MicroBatches):
        return " | ".join(dict.fromkeys(map(form_of, value)))
    return _form(value) if any(tensor.numel() for tensor in tensors_in(value)) else ""


def _form(value: Value) -> str:
    if isinstance(value, Tensor):
        shape = ", ".join(["samples", *map(str, value.shape[1:])] if value.dim() else [])
        return f"{str(value.dtype).removeprefix('torch.')} [{shape}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(f'{key!r}: {_form(item)}' for key, item in value.items()))}}}"
    if isinstance(value, tuple | list):
        items = [*map(_form, value)]
        return f"({', '.join(items)})" if any(map(tensors_in, value)) else "list"
    return type(value).__name__
