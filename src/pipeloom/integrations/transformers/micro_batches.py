"""The batches of one update, cut into the micro-batches of a schedule.

Trainer computes a loss per batch. A batch that is cut has one per micro-batch; `MicroBatch.share` is its part of the
mean over the batch.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from pipeloom.common.division import even_parts
from pipeloom.errors import InputError

_IGNORED = -100  # labels that no loss counts


class MicroBatch(NamedTuple):
    """Consecutive samples of a batch.

    Attributes:
        inputs: the keyword arguments of the model, with labels.
        share: the part of its labels that count in those of its batch over all replicas; without integer labels, of its
            samples. None: a repetition of other samples, which does not count.
        num_samples: its samples.
        share_of_samples: the part of its samples in those of its batch over all replicas.
    """

    inputs: dict[str, Any]
    share: float | None
    num_samples: int
    share_of_samples: float = 0.0

    @property
    def shares(self) -> tuple[float, float] | None:
        """The micro-batch's share of the labels and of the samples; None where it does not count."""
        return None if self.share is None else (self.share, self.share_of_samples)


def cut_update(
    batches: Sequence[Mapping[str, Any]],
    num_microbatches: int,
    *,
    replica: int = 0,
    num_replicas: int = 1,
    shifts_labels: bool = False,
    ignored: int | None = None,
) -> list[MicroBatch]:
    """Cut this replica's samples of several batches into micro-batches.

    Each batch is divided among the replicas, then into about equally large micro-batches. Where there are fewer samples
    than micro-batches, the others repeat a sample with share None.

    Args:
        batches: of one update, of all replicas.
        shifts_labels: whether the first label of each sequence does not count.
        ignored: a label that does not count, beside -100.

    Raises:
        InputError: there are more batches than micro-batches, or a batch has no tensor.
    """
    if len(batches) > num_microbatches:
        raise InputError(
            f"num_microbatches={num_microbatches}: an update has {len(batches)} batches. Use a multiple of "
            "gradient_accumulation_steps."
        )
    lengths = [num_samples(batch) for batch in batches]
    spans = [samples_of_replica(length, replica, num_replicas) for length in lengths]
    pieces: list[MicroBatch] = []
    for batch, length, span, number in zip(
        batches, lengths, spans, _numbers([len(span) for span in spans], num_microbatches), strict=True
    ):
        whole = counted_labels(batch, length, shifts_labels=shifts_labels, ignored=ignored)
        start = span.start
        for size in even_parts(len(span), number) if number else ():
            inputs = rows(batch, length, start, start + size)
            own = counted_labels(inputs, size, shifts_labels=shifts_labels, ignored=ignored)
            pieces.append(MicroBatch(inputs, own / whole if whole else size / length, size, size / length))
            start += size
    repeated = MicroBatch(rows(batches[0], lengths[0], 0, 1), None, 1)
    return pieces + [repeated] * (num_microbatches - len(pieces))


def are_even(pieces: Sequence[MicroBatch]) -> bool:
    """Whether micro-batches have as many labels per sample."""
    return all(piece.share is None or math.isclose(piece.share, piece.share_of_samples) for piece in pieces)


def num_samples(batch: Mapping[str, Any]) -> int:
    """The length of the labels or else of the first tensor of a batch. Raises InputError if it has none."""
    values = (batch.get("labels"), *batch.values())
    length = next((value.shape[0] for value in values if isinstance(value, Tensor) and value.dim()), 0)
    if length == 0:
        raise InputError("the data collator made a batch without samples: a batch is a dict of tensors.")
    return length


def rows(batch: Mapping[str, Any], length: int, start: int, stop: int) -> dict[str, Any]:
    """Samples `start` to `stop` of a batch of `length`; values of other lengths are whole."""
    return {name: _rows(value, length, start, stop) for name, value in batch.items()}


def _rows(value: Any, length: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.dim() and value.shape[0] == length else value
    if isinstance(value, Mapping):
        return rows(value, length, start, stop)
    if isinstance(value, list | tuple) and len(value) == length and not any(isinstance(v, Tensor) for v in value):
        return value[start:stop]
    if isinstance(value, list | tuple):
        return type(value)(_rows(each, length, start, stop) for each in value)
    return value


def counted_labels(batch: Mapping[str, Any], length: int, *, shifts_labels: bool, ignored: int | None) -> int:
    """The labels of a batch that count, or its number of samples."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return length
    counted = labels[..., 1:] if shifts_labels and labels.dim() > 1 else labels
    return int(((counted != _IGNORED) & (counted != (_IGNORED if ignored is None else ignored))).sum())


def samples_of_replica(length: int, replica: int, num_replicas: int) -> range:
    """The samples of a replica in a batch."""
    sizes = even_parts(length, num_replicas)
    start = sum(sizes[:replica])
    return range(start, start + sizes[replica])


def _numbers(lengths: Sequence[int], num_microbatches: int) -> list[int]:
    """How many micro-batches each batch is cut into: the largest are cut further until there are enough."""
    numbers = [int(length > 0) for length in lengths]
    while sum(numbers) < num_microbatches:
        left = [at for at, length in enumerate(lengths) if numbers[at] < length]
        if not left:
            break
        numbers[max(left, key=lambda at: lengths[at] / numbers[at])] += 1
    return numbers
