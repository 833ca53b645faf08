"""`OwnLoss`: the loss that a model of transformers computes from labels among its arguments."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.autograd.loss_metrics import Mean, zero_of
from pipeloom.engine.batch import Batch
from pipeloom.errors import InputError, folded
from pipeloom.transport.values import MicroBatches

_NUM_ITEMS = "num_items_in_batch"
_IGNORED = -100


class OwnLoss:
    """The loss in the output of a model that gets labels. The last stage gets them as keyword arguments.

    The loss is the mean over the labels of all replicas, however these are spread over micro-batches; a number
    `num_items_in_batch` in the batch, such as that of several batches between two updates, replaces theirs. A model
    that divides by `num_items_in_batch` gets its part of that number. A loss of another model is taken as the mean over
    the labels of its micro-batch, and weighted by them. Without "labels" (such as positions of answers), losses are
    means over samples.
    """

    joins_targets = True  # the engine passes the targets to the last stage

    def __init__(self, model: nn.Module) -> None:
        parameters = inspect.signature(model.forward).parameters
        self._names = frozenset(name for name in parameters if _is_label(name))
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        function: Any = getattr(model, "loss_function", None)
        self._decodes = "decoder_input_ids" in parameters
        self._takes_number = _NUM_ITEMS in parameters or (takes_any and function is not None)
        self._shifts = getattr(function, "__name__", "") == "ForCausalLMLoss"

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
        given = {} if targets is None else dict(targets) if isinstance(targets, Mapping) else {"labels": targets}
        if isinstance(batch, Mapping):
            inputs = {}
            for name, value in batch.items():
                if _is_label(name) or name == _NUM_ITEMS:
                    given.setdefault(name, value)
                else:
                    inputs[name] = value
            if (
                self._decodes
                and "labels" in given
                and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}
            ):
                inputs["labels"] = given["labels"]  # every stage makes the decoder's input from them
            batch = inputs
        number = given.get(_NUM_ITEMS)
        if isinstance(number, Tensor):
            given[_NUM_ITEMS] = number.item()
        given = {name: value for name, value in given.items() if value is not None}
        wrong = next((name for name in self._names & given.keys() if not isinstance(given[name], Tensor)), None)
        if wrong is not None:
            raise InputError(
                f"{wrong}: {folded(given[wrong])}: must be a tensor. Convert it, or make the batch with "
                "return_tensors='pt'."
            )
        return batch, given if any(isinstance(value, Tensor) for value in given.values()) else None

    def _separate_each(self, batch: Any, targets: Any) -> tuple[Any, Any]:
        """Separate micro-batches; one of the two may be missing, on a process that does not read it."""
        number = len(batch if targets is None else targets)
        pairs = zip(batch or [None] * number, targets or [None] * number, strict=True)
        inputs, labels = zip(*(self.separate(*pair) for pair in pairs), strict=True)
        found = None if any(each is None for each in labels) else MicroBatches(labels)
        return None if batch is None else MicroBatches(inputs), found

    def missing(self) -> str:
        """The error about a batch without labels."""
        names = " or ".join(map(repr, sorted(self._names))) or "labels"
        return (
            f"the batch has no labels, and the pipeline no loss_fn: the model computes its loss from {names}. Add them "
            "to the batch, or pass targets or loss_fn."
        )

    def count(self, whole: Sequence[Any]) -> tuple[int, int]:
        """Labels of a replica, and those that count; see `pipeloom.engine.batch.LabelWeights`."""
        if not whole or "labels" not in whole[0]:
            return 0, 0
        return sum(each["labels"].numel() for each in whole), sum(self._counts(whole))

    def weigh(self, batch: Batch, whole: Sequence[Any], counts: tuple[int, int]) -> None:
        """Add what a micro-batch's loss needs to its targets, so that its weighted loss is its part of the whole."""
        if not batch.targets or "labels" not in batch.targets[0]:
            return
        number = batch.targets[0].get(_NUM_ITEMS)
        if number is None:
            number = max(1, counts[1])
        batch.targets = [
            _Labels(target, count, number * weight, self._takes_number)
            for target, count, weight in zip(batch.targets, self._counts(whole), batch.weights, strict=True)
        ]

    def _counts(self, targets: Sequence[Any]) -> list[int]:
        labels = [each["labels"] for each in targets]
        counted = [each[..., 1:] if self._shifts and each.dim() > 1 else each for each in labels]
        found: list[int] = torch.stack([(each != _IGNORED).sum() for each in counted]).tolist()
        return found

    def __call__(self, output: Any, targets: Any) -> dict[str, Any]:
        """The loss in the model's output, as the part of this micro-batch, and other scalars in it as metrics."""
        loss: Tensor | None = output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(output, Mapping):
            raise InputError(
                f"the model returned a {type(output).__name__}, in which its loss has no name. Leave return_dict=False "
                "out, or pass loss_fn to Pipeline."
            )
        if loss is None:
            names = ", ".join(repr(name) for name in targets if name != _NUM_ITEMS)
            raise InputError(
                f"the model returned no loss for {names}: it computes none from them. Pass loss_fn to Pipeline."
            )
        scalars = {name: value for name, value in output.items() if name != "loss" and _is_scalar(value)}
        if not isinstance(targets, _Labels):
            return {"loss": loss, **scalars}
        metrics = {name: Mean(value, targets.count) for name, value in scalars.items()}
        if targets.number_was_read():
            return {"loss": loss, **metrics}
        if targets.count == 0:  # the mean over no label is not a number
            others = {name: value for name, value in output.items() if name != "loss" and name not in scalars}
            return {"loss": zero_of(others), **metrics}
        return {"loss": loss * (targets.count / targets.number), **metrics}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and not value.dim()


class _Labels(dict[str, Any]):
    """The targets of a micro-batch, with how its loss is weighted.

    Attributes:
        count: its labels that count.
        number: its part of the number of all labels: by what the sum over its labels is divided.
    """

    def __init__(self, targets: Mapping[str, Any], count: int, number: float, takes_number: bool) -> None:
        super().__init__(targets)
        self.count, self.number = count, number
        self.pop(_NUM_ITEMS, None)
        if takes_number:
            self[_NUM_ITEMS] = NoticedNumber.of(torch.tensor(number, dtype=torch.float64))

    def number_was_read(self) -> bool:
        """Whether the model's loss has used `num_items_in_batch`."""
        return getattr(self.get(_NUM_ITEMS), "was_read", False)


class NoticedNumber(Tensor):
    """A number that notices when it is used; results are plain tensors."""

    was_read = False

    @staticmethod
    def of(number: Tensor) -> "NoticedNumber":
        """A number that has not been used."""
        return number.as_subclass(NoticedNumber)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, NoticedNumber):
                each.was_read = True
        with torch._C.DisableTorchFunctionSubclass():
            args = tuple(each.as_subclass(Tensor) if isinstance(each, NoticedNumber) else each for each in args)
            return func(*args, **(kwargs or {}))


def separated(loss_fn: Any, inputs: Any, targets: Any, *, needs_targets: bool) -> tuple[Any, Any]:
    """Inputs and targets of a batch that may hold the labels, where `loss_fn` is the model's own.

    Raises:
        InputError: there are no labels, and this process needs them.
    """
    inputs = plain_batch(inputs)
    if targets is None and needs_targets and loss_fn is not None and not isinstance(loss_fn, OwnLoss):
        _check_has_targets(inputs)
    if isinstance(loss_fn, OwnLoss):
        inputs, targets = loss_fn.separate(inputs, plain_batch(targets))
        if targets is None and inputs is not None and needs_targets:
            raise InputError(loss_fn.missing())
    return inputs, targets


def _check_has_targets(inputs: Any) -> None:
    """Raises InputError for inputs that hold the targets, where a loss_fn needs these apart."""
    if isinstance(inputs, tuple | list) and len(inputs) == 2 and all(isinstance(each, Tensor) for each in inputs):
        raise InputError("targets=None: a batch of two tensors is passed as inputs. Call step(*batch).")
    label = next(filter(_is_label, inputs), None) if isinstance(inputs, dict) else None
    if label is not None:
        raise InputError(
            f"targets=None: loss_fn gets targets apart from the inputs, which hold {label!r}. Pass both, as in "
            f"step(batch, batch[{label!r}])."
        )


def plain_batch(batch: Any) -> Any:
    """A batch as the ecosystem makes it, such as a `BatchEncoding`, as a dict of its values."""
    return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


def _is_label(name: Any) -> bool:
    return isinstance(name, str) and ("label" in name or name in ("start_positions", "end_positions"))
