"""`BatchReader`: cuts the batches of one process into micro-batches and validates them, without communication."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeloom.engine.batch import Batch
from pipeloom.engine.binders.sequence_parts import cut_tokens
from pipeloom.engine.binders.sequence_slices import cut_sequences
from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.stores.sharing import Sharing
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.slicing import SequenceParts
from pipeloom.transport.values import Value, flatten, samples_of, too_few_samples


class Read(NamedTuple):
    """A batch, cut for this process.

    Attributes:
        batch: its micro-batches; without weights where replicas have others.
        whole: targets, before context-parallel ranks share them out.
    """

    batch: Batch
    whole: Sequence[Value] | None


class BatchReader:
    """Reads what the caller of a step or an evaluation passed.

    Args:
        reads_inputs, reads_targets: whether this process holds the first stage, the last stage.
        schedule: of a step.
        sharing: how replicas share work.
        slice_lengths: tokens of each slice, for a schedule with slices.
        sliced, parts, loss_fn, check_batch: as for `Executor`.
    """

    def __init__(
        self,
        *,
        reads_inputs: bool,
        reads_targets: bool,
        schedule: Schedule,
        sharing: Sharing,
        loss_fn: LossFn | None,
        sliced: bool,
        slice_lengths: Sequence[int] | None,
        parts: SequenceParts | None,
        check_batch: Callable[[Batch], None],
    ) -> None:
        self._reads_inputs, self._reads_targets, self._schedule = reads_inputs, reads_targets, schedule
        self._sharing, self._loss_fn, self._check_batch = sharing, loss_fn, check_batch
        self._sliced, self._slice_lengths, self._parts = sliced, slice_lengths, parts
        self._has_replicas = bool(sharing.replica_ranks)

    def read(self, inputs: Value, targets: Value, num_microbatches: int, *, training: bool, with_loss: bool) -> Read:
        """Cut a batch.

        Args:
            inputs, targets: as for `Pipeline.step`.
            num_microbatches: the most; a batch of fewer samples to evaluate has one micro-batch per sample.

        Raises:
            InputError: a value that this process reads cannot be used, or any has too few samples for a step.
        """
        needs_targets = with_loss and self._reads_targets
        if training:
            for value, what, reads in ((inputs, "inputs", self._reads_inputs), (targets, "targets", needs_targets)):
                if not reads:
                    _check_unread(value, num_microbatches, what)
        else:
            for value, what, reads in ((inputs, "inputs", self._reads_inputs), (targets, "targets", needs_targets)):
                if reads and value is not None:
                    num_microbatches = min(num_microbatches, samples_of(value, what))
        batch = Batch.cut(
            num_microbatches,
            self._sharing.inputs(inputs),
            targets,
            needs_inputs=self._reads_inputs,
            needs_targets=needs_targets,
        )
        if self._sliced:
            cut_sequences(batch, self._schedule.num_slices, self._slice_lengths)
        self._check_batch(batch)
        read = Read(batch, batch.targets)
        if self._parts is not None:
            cut_tokens(batch, self._parts)
        if not self._has_replicas:
            self.weigh(read, batch.num_samples)
        return read

    def weigh(self, read: Read, all_samples: int) -> None:
        """Set the weights of micro-batches for a batch of `all_samples` samples; every replica calls it."""
        batch = read.batch
        batch.all_samples = all_samples
        if not batch.sizes:
            return
        batch.weigh(all_samples)
        weigh_labels = getattr(self._loss_fn, "weigh", None)
        if weigh_labels is not None:
            weigh_labels(batch, self._sharing.sum_counts, read.whole)


def _check_unread(value: Value, num_microbatches: int, what: str) -> None:
    """Raises InputError where other ranks refuse the same value: this rank would wait for them."""
    try:
        tensors = [] if value is None else flatten(value)[1]
    except InputError:
        return
    lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(lengths) == 1 and min(lengths) < num_microbatches:
        raise InputError(too_few_samples(what, min(lengths), num_microbatches))
