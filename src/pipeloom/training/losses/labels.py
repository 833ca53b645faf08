"""What is known of the labels of a model that computes its own loss: names, counts and weights in a micro-batch."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeloom.errors import InputError, folded
from pipeloom.training.losses.output_loss import values_of

NUM_ITEMS = "num_items_in_batch"


class MicroBatchLabels(dict[str, Any]):
    """The targets of a micro-batch, with how its loss is weighted.

    Attributes:
        counts: its labels that count, as they are and shifted.
        numbers: its parts of the numbers of all labels: by what the sum over its labels is divided.
        weight: its part of the samples.
        passed: the number that the model gets; None: it gets none.
        is_even: whether all micro-batches have as many labels per sample.
        is_empty: whether no label of any micro-batch counts.
    """

    def __init__(
        self,
        targets: Mapping[str, Any],
        counts: tuple[int, int],
        numbers: Sequence[float],
        weight: float,
        passed: bool | None,
        is_even: bool,
        is_empty: bool,
    ) -> None:
        super().__init__(targets)
        self.counts, self.numbers, self.weight = counts, numbers, weight
        self.is_even, self.is_empty = is_even, is_empty
        self.pop(NUM_ITEMS, None)
        self.passed = None if passed is None else numbers[passed]
        if passed is not None:
            self[NUM_ITEMS] = NoticedNumber.of(torch.tensor(numbers[passed], dtype=torch.float64))

    def number_was_read(self) -> bool:
        """Whether the model's loss has used `num_items_in_batch`."""
        return getattr(self.get(NUM_ITEMS), "was_read", False)


def declares_no_loss(model: Any) -> bool:
    """Whether the forward is annotated to return dataclasses, as models of transformers are, all without a loss.

    One that names a loss in its code may return it nevertheless.
    """
    if not isinstance(model, nn.Module):
        return False
    try:
        declared = get_type_hints(type(model).forward).get("return")
    except (NameError, TypeError, AttributeError):  # names that are imported for a type checker alone
        return False
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    if code is not None and any("loss" in name for name in (*code.co_varnames, *code.co_names)):
        return False
    kinds: list[Any] = [each for each in (declared, *get_args(declared)) if is_dataclass(each)]
    return bool(kinds) and not any("loss" in each.name for kind in kinds for each in fields(kind))


def check_tensors(labels: Mapping[str, Any]) -> None:
    """Raises InputError for labels that are no tensors."""
    for name, value in sorted(labels.items()):
        if isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            raise InputError(
                f"{name} is a {type(value).__name__} of dicts: the pipeline cuts labels along dimension 0 of tensors. "
                "Pad them to tensors [samples, ...], pass these as targets, and compute the loss in a loss_fn."
            )
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name}: {folded(value)}: must be a tensor. Convert it, or make the batch with return_tensors='pt'."
            )


def check_given_once(name: str, value: Any, targets: Mapping[str, Any]) -> None:
    """Raises InputError for labels in a batch that differ from those of the same name in its targets."""
    other = targets.get(name)
    if other is None or value is None or other is value or _equal(other, value):
        return
    raise InputError(f"{name!r} is in the batch, and other values of it are targets: the model takes one. Remove one.")


def _equal(one: Any, other: Any) -> bool:
    tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
    return one.shape == other.shape and bool(torch.eq(one, other.to(one.device)).all()) if tensors else one == other


def num_samples_of(targets: Any) -> int:
    """The samples of a micro-batch's targets; 0: they do not say."""
    tensors = [each for each in values_of(targets) if isinstance(each, Tensor) and each.dim()]
    return len(tensors[0]) if tensors else 0


def is_label(name: Any) -> bool:
    """Whether an argument of this name holds labels."""
    return isinstance(name, str) and ("label" in name or name in ("targets", "start_positions", "end_positions"))


def labels_key(targets: Mapping[str, Any]) -> str:
    """The key of the labels: "labels", or that of the only tensor of integers."""
    found = [key for key, value in targets.items() if _are_labels(value)]
    return found[0] if len(found) == 1 else "labels"


def labels_of(targets: Any) -> Any:
    """Labels in targets: a tensor of integers, or the one in a dict (`labels_key`); None: there are none."""
    labels = targets.get(labels_key(targets)) if isinstance(targets, Mapping) else targets
    return labels if _are_labels(labels) else None


def _are_labels(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32) and value.dim() > 0


class NoticedNumber(Tensor):
    """A number that notices when it is used; results are plain tensors.

    Attributes, questions about the tensor and copies are no use: stages pass on what they got. A copy tells the number
    of its use; on the meta device, where only shapes are found out, it has no value.
    """

    uses: list[Any]

    @staticmethod
    def of(number: Tensor, uses: list[Any] | None = None) -> "NoticedNumber":
        """A number that has not been used; `uses`: of the number of which it is a copy."""
        found = number.as_subclass(NoticedNumber)
        found.uses = [] if uses is None else uses
        return found

    @property
    def was_read(self) -> bool:
        """Whether the number, or a copy, has been used."""
        return bool(self.uses)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" or func in _QUESTIONS:
                return func(*args, **kwargs)
            if func in _COPIES and isinstance(args[0], NoticedNumber):
                copy, uses = func(*args, **kwargs), args[0].uses
                return copy if copy.device.type == "meta" else NoticedNumber.of(copy.as_subclass(Tensor), uses)

            def used(number: "NoticedNumber") -> Tensor:
                number.uses.append(func)
                return number.as_subclass(Tensor)

            args, kwargs = tree_map_only(NoticedNumber, used, (args, kwargs))
            return func(*args, **kwargs)


_COPIES = frozenset({Tensor.to, Tensor.detach, Tensor.clone, Tensor.cpu, Tensor.cuda, Tensor.contiguous})
_QUESTIONS = frozenset(
    {
        *(Tensor.dim, Tensor.ndimension, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, Tensor.__len__),
        *(Tensor.element_size, Tensor.storage_offset, Tensor.data_ptr, Tensor.untyped_storage, Tensor.get_device),
        *(Tensor.is_inference, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.is_shared),
        *(Tensor.is_signed, Tensor.is_conj, Tensor.is_neg, Tensor.is_pinned, Tensor.is_set_to, Tensor.__hash__),
        *(torch.is_tensor, torch.is_inference, torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
