"""The batches of a stream, taken from the user's iterable when their first micro-batch is needed."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pipeloom.engine.batch import Batch, label_weights, prepared
from pipeloom.engine.rank_state import LossFn
from pipeloom.errors import CallerError, InputError, one_line
from pipeloom.ir import Schedule
from pipeloom.training.losses.own_loss import OwnLoss, separated


class StreamBatches:
    """One process's batches of one run. Inputs and targets that this process needs are kept until they are read.

    Args:
        batches: yields ``(inputs, targets)`` of each batch; unused where this process reads neither.
        num_batches: number of batches of the run.
        schedule: of the whole run.
        ranks: of this process.
        loss_fn: of the pipeline.

    Attributes:
        batch: the batch for the actions of the run. Inputs, target and weight of a micro-batch can be read once; its
            weight is its share of the samples of its batch.
        num_samples: of the batches that were taken so far, by index.
    """

    def __init__(
        self,
        batches: Iterable[Any] | None,
        num_batches: int,
        schedule: Schedule,
        ranks: Sequence[int],
        loss_fn: LossFn | None,
    ) -> None:
        assert schedule.microbatches_per_update is not None
        self._num_batches, self._size = num_batches, schedule.microbatches_per_update
        self._place, self._last, self._ranks = schedule.placement, schedule.num_stages - 1, ranks
        self._reads_inputs = any(rank in self._place.replicas[0] for rank in ranks)
        self._reads_targets = any(rank in self._place.replicas[self._last] for rank in ranks)
        reads = self._reads_inputs or self._reads_targets
        self._iterator: Iterator[Any] = iter(batches) if reads and batches is not None else iter(())
        self._num_taken, self._loss_fn = 0, loss_fn
        self._lock = threading.Lock()  # ranks of one process may have a thread each
        self._inputs, self._targets, self._weights = (
            _Pieces(self.take_until, schedule.num_microbatches) for _ in range(3)
        )
        self.num_samples: dict[int, int] = {}
        self.batch = Batch(
            inputs=self._inputs if self._reads_inputs else (),
            targets=self._targets if self._reads_targets else None,
            weights=self._weights,
            collects=True,
        )

    def finish(self, num_batches: int) -> None:
        """Take the remaining ones of `num_batches`, so that the iterator advances equally on all processes."""
        if self._reads_inputs or self._reads_targets:
            self.take_until(num_batches * self._size - 1)
        self._iterator = iter(())  # releases the user's iterator

    def take_until(self, microbatch: int) -> None:
        """Take batches up to the one of `microbatch`."""
        with self._lock:
            while self._num_taken <= microbatch // self._size:
                self._take()

    def _take(self) -> None:
        number = self._num_taken
        try:
            value = next(self._iterator)
        except StopIteration:
            raise CallerError(
                f"batches: item {number} is missing, they ended after {number} of {self._num_batches}. Pass more "
                "batches, or a smaller num_batches."
            ) from None
        except Exception as error:
            raise CallerError(
                f"batches: item {number} raised {one_line(error)}: a run needs {self._num_batches} batches."
            ) from error
        if isinstance(self._loss_fn, OwnLoss) and isinstance(value, Mapping):
            value = (value, None)  # has the labels
        if not isinstance(value, tuple | list) or len(value) != 2:
            length = f" of {len(value)}" if isinstance(value, tuple | list) else ""
            raise CallerError(
                f"batches: item {number} is a {type(value).__name__}{length}: must be a pair (inputs, targets)."
            )
        try:
            cut = self._cut(*value)
        except InputError as error:
            raise CallerError(f"batches: item {number}: {error}") from error
        first, last = (0, self._inputs, cut.inputs), (self._last, self._targets, cut.targets or ())
        for stage, pieces, values in (first, last, (self._last, self._weights, cut.weights)):
            for microbatch, piece in enumerate(values, number * self._size):
                if self._place.rank_of(stage, microbatch) in self._ranks:
                    pieces.kept[microbatch] = piece
        self.num_samples[number] = cut.num_samples
        self._num_taken += 1

    def _cut(self, inputs: Any, targets: Any) -> Batch:
        inputs, targets = separated(self._loss_fn, inputs, targets, needs_targets=self._reads_targets)
        targets = prepared(self._loss_fn, targets) if self._reads_targets else None
        cut = Batch.cut(self._size, inputs, targets, needs_inputs=self._reads_inputs, needs_targets=self._reads_targets)
        cut.weigh(cut.num_samples)
        weights = label_weights(self._loss_fn, targets) if self._reads_targets else None
        if weights is not None:
            whole = cut.targets or ()
            weights.weigh(cut, whole, weights.count(whole))
        return cut


class _Pieces(Sequence[Any]):
    """One value per micro-batch; reading a value removes it."""

    def __init__(self, take_until: Callable[[int], None], length: int) -> None:
        self.kept: dict[int, Any] = {}
        self._take_until = take_until
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, microbatch: Any) -> Any:
        self._take_until(microbatch)
        return self.kept.pop(microbatch)
