"""Runs the backwards of a batch, in the order in which autograd visits the calls: the forward's, reversed.

Each partition has a list of steps: a recomputation and a backward for each micro-batch, the last one first. A step
starts in the partition's thread when the one before it has ended; a backward also needs its gradient. So the
recomputation of a micro-batch overlaps with the backwards of later partitions, and no more than one recomputed
micro-batch is held per partition.
"""

import threading
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from pipeloom.pipe.calls.devices import Mark
from pipeloom.pipe.calls.stage_call import StageCall
from pipeloom.pipe.calls.stage_values import InputGradients, OutputGradients
from pipeloom.pipe.skips import SkipRoutes
from pipeloom.pipe.workers import Workers


class BackwardRun:
    """The backwards of one batch.

    Args:
        workers: the threads.
        calls: for each micro-batch, its calls.
        routes: of the skips.
        keep: whether a further backward may follow.

    Attributes:
        given: for each micro-batch and partition, the gradients of what its forward gave.
        inputs: for each micro-batch, the gradients of the pipe's inputs.
        parameters: for each partition, the sums of its parameters' gradients.
    """

    def __init__(
        self, workers: Workers, calls: Sequence[Sequence[StageCall]], routes: SkipRoutes, *, keep: bool
    ) -> None:
        self._workers = workers
        self._calls = calls
        self._routes = routes
        self._keep = keep
        num_stages = len(calls[0])
        self.given = [[OutputGradients() for _ in each] for each in calls]
        self.inputs: list[tuple[list[Tensor | None], Mark]] = [([], None) for _ in calls]
        self.parameters: list[list[Tensor | None]] = [[] for _ in range(num_stages)]
        self._num_added = [0] * num_stages
        self._steps: list[deque[tuple[bool, int]]] = [deque() for _ in range(num_stages)]  # (recomputes, micro-batch)
        self._busy = [False] * num_stages
        self._missing = len(calls) * num_stages
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def submit(self, microbatch: int, stage: int, *, recomputes: bool) -> None:
        """Append a step to the partition's list."""
        with self._lock:
            self._steps[stage].append((recomputes, microbatch))
            self._advance(stage)

    def wait(self) -> None:
        """Wait for all backwards; raises the first error, once no step runs."""
        try:
            self._ended.wait()
        except BaseException as error:
            with self._lock:
                self._error = error
                self._end()
            self._ended.wait()
            raise
        if self._error is not None:
            raise self._error

    def _advance(self, stage: int) -> None:
        """Start the partition's next step, if it can; the lock is held."""
        if self._busy[stage] or not self._steps[stage] or self._error is not None:
            return
        recomputes, microbatch = self._steps[stage][0]
        if not recomputes and self.given[microbatch][stage].tensors is None:
            return
        self._steps[stage].popleft()
        self._busy[stage] = True
        self._workers.put(stage, lambda: self._run(recomputes, microbatch, stage))

    def _run(self, recomputes: bool, microbatch: int, stage: int) -> None:
        call = self._calls[microbatch][stage]
        try:
            found = None
            if recomputes:
                call.recomputation()
            else:
                given, self.given[microbatch][stage] = self.given[microbatch][stage], OutputGradients()
                found = call.backward(given, keep=self._keep, receiver=self._workers.receivers[stage])
                self._add(stage, found.parameters)
            with self._lock:
                self._busy[stage] = False
                if found is not None:
                    self._missing -= 1
                    self._deliver(microbatch, stage, found)
                self._advance(stage)
                self._end()
        except BaseException as error:
            error.add_note(f"in the backward of {call.place}")
            with self._lock:
                self._busy[stage] = False
                self._error = self._error or error
                self._end()

    def _deliver(self, microbatch: int, stage: int, found: InputGradients) -> None:
        """Give the gradients to the partitions where the values came from; the lock is held."""
        for key, gradient in found.skips.items():
            home = self._routes.received[stage][key]
            self.given[microbatch][home].skips[key] = gradient, found.ready
        if not stage:
            self.inputs[microbatch] = found.tensors, found.ready
            return
        before = self.given[microbatch][stage - 1]
        before.tensors, before.ready = found.tensors, found.ready
        self._advance(stage - 1)

    def _add(self, stage: int, gradients: list[Tensor | None]) -> None:
        """Add a micro-batch's gradients to the sums, in the partition's thread."""
        sums = self.parameters[stage]
        self._num_added[stage] += 1
        if self._num_added[stage] == 1:
            sums += gradients
            return
        for index, gradient in enumerate(gradients):
            before = sums[index]
            if gradient is None:
                continue
            if before is None:
                sums[index] = gradient
            elif self._num_added[stage] == 2:  # autograd may use the memory of the first one elsewhere
                sums[index] = before + gradient
            else:
                before.add_(gradient)

    def _end(self) -> None:
        """Tell the waiting thread, if nothing remains; the lock is held."""
        if not self._missing or (self._error is not None and not any(self._busy)):
            self._ended.set()
