"""Runs the forwards of a batch: a call starts in its partition's thread as soon as its input is there.

Partition `j` runs micro-batches 0, 1, 2, ... in this order. With 3 partitions and 3 micro-batches (arXiv:1811.06965,
figure 2)::

    partition 0   0 1 2
    partition 1     0 1 2
    partition 2       0 1 2
"""

import threading
from collections.abc import Sequence

from pipeloom.pipe.calls.randomness import BatchRandomness
from pipeloom.pipe.calls.stage_call import StageCall
from pipeloom.pipe.calls.stage_values import Output, Sent
from pipeloom.pipe.skips import SkipRoutes
from pipeloom.pipe.workers import Workers
from pipeloom.split.skippable import SkipKey


class ForwardRun:
    """The forwards of one batch.

    Args:
        workers: the threads.
        calls: for each micro-batch, its calls.
        routes: of the skips.
        randomness: of the batch.

    Attributes:
        outputs: for each micro-batch, what each partition gave; values only of the last one.
    """

    def __init__(
        self,
        workers: Workers,
        calls: Sequence[Sequence[StageCall]],
        routes: SkipRoutes,
        randomness: BatchRandomness,
    ) -> None:
        self._randomness = randomness
        self._workers = workers
        self._calls = calls
        self._routes = routes
        self.outputs: list[list[Output]] = [[] for _ in calls]
        self._skips: dict[tuple[int, SkipKey], Sent | None] = {}
        self._lock = threading.Lock()
        self._pending = 0
        self._ended = threading.Event()
        # The first failure in the order of the schedule: (column of the picture above, partition), and its error.
        self._failure: tuple[tuple[int, int], BaseException] | None = None

    def start(self, inputs: Sequence[list[Sent]], *, atomic: bool) -> None:
        """Start all micro-batches."""
        with self._lock:
            self._pending = len(inputs)
        for microbatch, tensors in enumerate(inputs):
            self._put(microbatch, 0, tensors, atomic)

    def wait(self) -> None:
        """Wait for all forwards; raises the error that comes first in the schedule.

        After an error, and after an interrupt of the waiting thread, calls that did not start are left out; the others
        end first.
        """
        try:
            self._ended.wait()
        except BaseException as error:
            self._fail((-1, 0), error)
            self._ended.wait()
            raise
        if self._failure is not None:
            raise self._failure[1]

    def _put(self, microbatch: int, stage: int, tensors: list[Sent], atomic: bool) -> None:
        self._workers.put(stage, lambda: self._run(microbatch, stage, tensors, atomic))

    def _run(self, microbatch: int, stage: int, tensors: list[Sent], atomic: bool) -> None:
        column = microbatch + stage
        goes_on = False
        try:
            with self._randomness.turn():
                output = self._call(microbatch, stage, tensors, atomic)
            goes_on = output is not None and stage + 1 < len(self._calls[microbatch])
            if output is not None and goes_on:
                self.outputs[microbatch].append(output._replace(tensors=[], skips={}))
                self._put(microbatch, stage + 1, output.tensors, output.atomic)
            elif output is not None:
                self.outputs[microbatch].append(output)
        except BaseException as error:  # of the user's layers, such as SystemExit: raised in the user's thread
            error.add_note(f"in {self._calls[microbatch][stage].place}")
            self._fail((column, stage), error)
        finally:
            with self._lock:
                self._pending -= not goes_on
                if not self._pending:
                    self._ended.set()

    def _call(self, microbatch: int, stage: int, tensors: list[Sent], atomic: bool) -> Output | None:
        """What a call gives; None after an error.

        Calls of the same column run beside the one that failed: which error is first does not depend on time.
        """
        if self._failure is not None and microbatch + stage > self._failure[0][0]:
            return None
        skips = {key: self._skips.pop((microbatch, key)) for key in self._routes.received[stage]}
        call = self._calls[microbatch][stage]
        output = call.forward(tensors, skips, atomic=atomic, receiver=self._workers.receivers[stage])
        self._skips.update({(microbatch, key): skip for key, skip in output.skips.items()})
        return output

    def _fail(self, place: tuple[int, int], error: BaseException) -> None:
        with self._lock:
            if self._failure is None or place < self._failure[0]:
                self._failure = place, error
