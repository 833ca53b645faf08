"""`BatchReader`: cuts the batches of one process into micro-batches and validates them.

`Programs` are the checked programs of a pipeline: one for `step`, others for evaluation.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeloom.devices import Device
from pipeloom.engine.batch import Batch, LabelWeights, form_of, label_weights, moved, prepared
from pipeloom.engine.binders.sequence_parts import cut_tokens
from pipeloom.engine.binders.sequence_slices import cut_sequences
from pipeloom.engine.calls.agreement import BatchAgreement, RankCall
from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.stores.sharing import Sharing
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.slicing import SequenceParts
from pipeloom.transport.values import MicroBatches, Value, flatten, samples_of, too_few_samples


class Programs(NamedTuple):
    """The programs that every rank of a pipeline runs.

    Attributes:
        train, forward: of a step, and of its forwards alone.
        forward_of: the forwards of the first micro-batches.
    """

    train: Program
    forward: Program
    forward_of: Callable[[int], Program]


class Batching(NamedTuple):
    """How a batch becomes the micro-batches of a rank.

    Attributes:
        check: raises InputError for micro-batches that the stages cannot run.
        loss_fn: loss of one micro-batch; None: no loss is computed.
        sliced: whether micro-batches run in slices, even if in one.
        slice_lengths: tokens of each slice; None: equal slices.
        parts: cuts sequences between context-parallel ranks; None: this rank has whole sequences.
    """

    check: Callable[[Batch], None]
    loss_fn: LossFn | None = None
    sliced: bool = False
    slice_lengths: Sequence[int] | None = None
    parts: SequenceParts | None = None


class Read(NamedTuple):
    """A batch, cut for this process.

    Attributes:
        batch: its micro-batches; without weights where replicas have others.
        whole: targets, before context-parallel ranks share them out.
        weights: what weighs their labels; None: nothing does.
        labels: what `weights` counted in them.
        elements: what it counted in the last batch, see `LabelWeights`.
    """

    batch: Batch
    whole: Sequence[Value] = ()
    weights: LabelWeights | None = None
    labels: tuple[int, int] = (0, 0)
    elements: tuple[int, int] = (0, 0)


class BatchReader:
    """Reads what the caller of a step or an evaluation passed.

    Args:
        reads_inputs, reads_targets: where the first stage, the last stage of this process computes: inputs and targets
            are moved there; None: it holds no such stage.
        programs: of the pipeline.
        sharing: how replicas share work.
        how: how batches are cut, and what they are checked for.
    """

    def __init__(
        self,
        *,
        reads_inputs: Device | None,
        reads_targets: Device | None,
        programs: Programs,
        sharing: Sharing,
        how: Batching,
    ) -> None:
        self._reads_inputs, self._reads_targets = reads_inputs is not None, reads_targets is not None
        self._devices = reads_inputs, reads_targets
        self._programs, self._sharing, self._how = programs, sharing, how
        self._has_replicas = bool(sharing.replica_ranks)

    def read(
        self,
        read: Callable[[], tuple[Value, Value]],
        agreement: BatchAgreement | None,
        call: RankCall,
        *,
        training: bool,
        with_loss: bool,
    ) -> Batch:
        """The micro-batches of this process, in a number that all ranks agree on.

        Args:
            read: returns inputs and targets, as for `Pipeline.step`.
            agreement: with the other ranks; None: there are none, or they notice a refusal later.
            call: as this process makes it.
            training: whether the batch is trained; else it may have fewer samples than micro-batches.
            with_loss: whether the targets are read.

        Raises:
            InputError: a batch cannot be used. Without `agreement`, any error of `read`.
            RunError: see `BatchAgreement.agree`.
        """
        count = (self._programs.train if training else self._programs.forward).num_microbatches
        found, refusal, agreed = Read(Batch()), None, None
        given: tuple[Value, Value] | None = None
        while True:
            try:
                given = read() if given is None else given
                found = self._cut(*given, count, training=training, with_loss=with_loss)
                if self._reads_inputs or (with_loss and self._reads_targets):
                    found.batch.forms = form_of(given[0]), form_of(given[1]) if with_loss else ""
            except Exception as error:
                if agreement is None:
                    raise
                refusal = error
            if agreement is None:
                break
            agreed = agreement.agree(found.batch, found.labels, refusal, call, found.elements)
            enough = training or min(count, agreed.most) <= agreed.fewest
            count = min(count, agreed.fewest)
            if enough:
                break  # else replicas with larger batches cut them again
        batch = found.batch
        batch.num_microbatches = batch.num_microbatches or count
        if agreed is not None:
            batch.all_samples = agreed.all_samples
            if self._has_replicas:
                self._weigh(found, agreed.all_samples, agreed.labels)
                if any(found.elements):
                    compares: Any = found.weights
                    compares.compare_replicas(found.elements, agreed.elements)
        for_inputs, for_targets = self._devices  # moved at the end: what was counted is on the host, without a wait
        if for_inputs is not None and for_inputs.is_asynchronous:
            batch.inputs = [moved(value, for_inputs) for value in batch.inputs]
        if for_targets is not None and for_targets.is_asynchronous and batch.targets is not None:
            batch.targets = [moved(value, for_targets) for value in batch.targets]
        return batch

    def _cut(self, inputs: Value, targets: Value, num_microbatches: int, *, training: bool, with_loss: bool) -> Read:
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
        targets = prepared(self._how.loss_fn, targets) if needs_targets else None
        batch = Batch.cut(
            num_microbatches,
            self._sharing.inputs(inputs),
            targets,
            needs_inputs=self._reads_inputs,
            needs_targets=needs_targets,
        )
        how = self._how
        if how.sliced:
            cut_sequences(batch, self._programs.train.schedule.num_slices, how.slice_lengths)
        how.check(batch)
        weights, whole = label_weights(how.loss_fn, targets) if needs_targets else None, batch.targets or ()
        counts_elements: Any = getattr(weights, "elements", None)
        elements = (0, 0) if counts_elements is None else counts_elements()
        read = Read(batch, whole, weights, (0, 0) if weights is None else weights.count(whole), elements)
        if how.parts is not None:
            cut_tokens(batch, how.parts)
        if not self._has_replicas:
            self._weigh(read, batch.num_samples, read.labels)
        return read

    def _weigh(self, read: Read, all_samples: int, labels: tuple[int, int]) -> None:
        """Set the weights of micro-batches for `all_samples` samples with these labels, of all replicas."""
        batch = read.batch
        batch.all_samples = all_samples
        if not batch.sizes:
            return
        batch.weigh(all_samples)
        if read.weights is not None:
            read.weights.weigh(batch, read.whole, labels)


def _check_unread(value: Value, num_microbatches: int, what: str) -> None:
    """Raises InputError where other ranks refuse the same value: this rank would wait for them."""
    try:
        tensors = [] if value is None or isinstance(value, MicroBatches) else flatten(value)[1]
    except InputError:
        return
    lengths = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(lengths) == 1 and min(lengths) < num_microbatches:
        raise InputError(too_few_samples(what, min(lengths), num_microbatches))
