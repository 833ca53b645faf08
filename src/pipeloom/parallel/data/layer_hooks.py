"""What happens between the layers of a running stage: gathering, freeing, and reductions that start early.

    F   wait 0, start 1 | layer 0 | free 0, wait 1, start 2 | layer 1 | ...
    B   gradient of the last output: wait n, start n-1 | layer n | gradient of layer n-1's output: free n, wait n-1 ...

Autograd's engine runs what was computed last first: when it comes to the gradient of a layer's output, the layers
behind have run all that they can. So a hook on that gradient may free them. In I it is the same; W reads no parameters.

Where main parameters are in a store, what is gathered next is read one more layer ahead (`Unit.prefetch`): a read is
under way while the layer behind it is gathered and the one behind that computes.

Copies of a pipeline have to start their collectives in one order, whatever parameters their samples leave without a
gradient. So where a backward also gathers, it is these hooks that start reductions, and not the gradients that arrive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.parallel.data.unit import Unit


class LayerGathers:
    """Has every layer of a stage wait for its own parameters. A `pipeloom.split.module.LayerObserver`.

    Args:
        layers: the units that each layer has to have gathered. One of several neighbours stays from the first of them
            to the last.
        one_by_one: whether to gather them one ahead and to free them behind, or to leave that to the program.
    """

    def __init__(self, layers: Sequence[Sequence[Unit]], *, one_by_one: bool) -> None:
        self.layers = layers
        self.one_by_one = one_by_one
        self._first = {unit: i for i, layer in reversed(list(enumerate(layers))) for unit in layer}
        self._forward = False
        self._current = len(layers)  # the layer whose backward runs
        self._kept: set[Unit] = set()  # what no hook could gather for its backward
        self._completion: Completion | None = None  # of the backward that runs

    def first(self, *, forward: bool) -> list[Unit]:
        """What a computation of the stage begins with, and what it would have to wait for behind that."""
        ahead = self._layer(1 if forward else len(self.layers) - 2)
        return [*self.layers[0 if forward else -1], *(unit for unit in ahead if unit.waits_for_reads)]

    def begin(self, *, forward: bool) -> None:
        """A computation of the stage begins."""
        self._forward, self._current = forward, len(self.layers)
        if not forward:
            for layer in self.layers:
                for unit in layer:
                    if not self.one_by_one or unit in self._kept:
                        unit.wait()

    @contextmanager
    def completing(self, completion: Completion) -> Iterator[None]:
        """Around a last backward that gathers one by one: layers that are done start its reductions."""
        self._completion = completion
        completion.begin()
        try:
            yield
        finally:
            self._completion = None

    def before(self, index: int) -> None:
        """In front of a layer; in a recomputation too."""
        for unit in self.layers[index]:
            unit.wait()
        if self._forward:
            self._look_ahead(index + 1, index + 2)

    def after(self, index: int, value: Any) -> None:
        """Behind a layer, which returned `value`."""
        if not (self.one_by_one and self._forward):
            return
        ahead = self.layers[index + 1] if index + 1 < len(self.layers) else ()
        self._free(index, ahead)
        if torch.is_grad_enabled():
            outputs = [t for t in tree_leaves(value) if isinstance(t, Tensor) and t.requires_grad]
            for output in outputs:
                output.register_hook(partial(self._enter, index))  # type: ignore[no-untyped-call]
            if not outputs:  # its backward may begin somewhere else
                self._kept.update(self.layers[index])

    def _enter(self, index: int, gradient: Tensor) -> None:
        """The backward of a layer begins. Layers that were passed over, such as dropped ones, count as done."""
        while self._current > index:
            self._step_back()

    def _step_back(self) -> None:
        """The backward of the layer before the current one begins."""
        done, index = self._current, self._current - 1
        for unit in self.layers[index]:
            unit.wait()
        if done < len(self.layers):
            self._free(done, self.layers[index])
        self._current = index
        if self._completion is not None:
            self._completion.reach(lambda unit: self._first.get(unit, -1) >= done)
        self._look_ahead(index - 1, index - 2)

    def _look_ahead(self, index: int, after: int) -> None:
        """Gather a layer, and read the one after it."""
        for unit in self._layer(index):
            if self.one_by_one or unit.waits_for_reads:  # others the program has started
                unit.start_gather()
        for unit in self._layer(after):
            if self.one_by_one:
                unit.prefetch()

    def _layer(self, index: int) -> Sequence[Unit]:
        return self.layers[index] if 0 <= index < len(self.layers) else ()

    def _free(self, index: int, needed: Sequence[Unit]) -> None:
        for unit in self.layers[index]:
            if unit not in needed and not (unit in self._kept and not self._forward):
                unit.free()


class Completion:
    """Starts the reductions of one REDUCE_GRAD inside the last backward that it covers.

    Args:
        units: in the order in which they are reduced, on all copies alike.
        start: starts one.
    """

    def __init__(self, units: Sequence[Unit], start: Callable[[Unit], None]) -> None:
        self._units, self._start = units, start
        self._queue: deque[Unit] = deque()
        self._missing: dict[Unit, set[int]] = {}
        self._begun = False

    def begin(self) -> None:
        """The last backward begins."""
        self._queue.extend(unit for unit in self._units if unit.trains)
        self._begun = True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Around the last backward: a unit starts when all its parameters have their gradients."""
        self.begin()
        handles = []
        for unit in self._queue:
            wanted = [(i, parameter) for i, parameter in enumerate(unit.parameters) if parameter.requires_grad]
            self._missing[unit] = {index for index, _ in wanted}
            for index, parameter in wanted:
                hook = partial(self._arrived, unit, index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def reach(self, done: Callable[[Unit], bool]) -> None:
        """No more gradients of some units will come."""
        while self._queue and done(self._queue[0]):
            self._start(self._queue.popleft())

    def flush(self) -> None:
        """Start those that are still to come, also where gradients are missing."""
        if not self._begun:
            self._queue.extend(unit for unit in self._units if unit.trains)
        while self._queue:
            self._start(self._queue.popleft())
        self._missing.clear()
        self._begun = False

    def drop(self) -> None:
        """Forget a run that failed."""
        self._queue.clear()
        self._missing.clear()
        self._begun = False

    def _arrived(self, unit: Unit, index: int, _: Tensor) -> None:
        missing = self._missing.get(unit)
        if missing is None:
            return
        missing.discard(index)
        while self._queue and not self._missing[self._queue[0]]:
            self._start(self._queue.popleft())
