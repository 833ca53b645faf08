"""Random numbers of stages that run at the same time.

All threads of a process share the CPU's generator. Were two stages to draw from it at once, a run could not be
repeated, and a recomputation would draw other numbers than its forward. So stages that draw take turns: each call of a
stage starts from a seed of its own, derived from the generator, the stage and the micro-batch. Whether a model draws is
seen in its first batch, in which stages take turns; a model that does not draw leaves the generator as it was.

A batch of one micro-batch, or a pipe of one partition, runs one stage at a time and draws as the plain model does. A
generator of a CUDA device serves one partition; its state is restored for a recomputation. So are the states of
Python's and numpy's generators, where stages that draw from them take turns; the order of the turns decides what they
draw.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from pipeloom.common.random_states import RandomStates

_SEEDS = 2**63
_STAGES = 2**20  # more than there are partitions


class RandomState(NamedTuple):
    """What a recomputation restores: the states of the CPU's and of the device's generator; None: not needed.

    Attributes:
        host, device: of torch's generators.
        others: of Python's and numpy's.
    """

    host: Tensor | None
    device: Tensor | None
    others: RandomStates | None = None


class Turns:
    """A lock that goes to the thread that has waited longest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[threading.Event] = deque()
        self._taken = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()
            else:
                self._taken = False


class Randomness:
    """What a pipe knows of its model's random numbers, for train and eval.

    Args:
        alone: whether the pipe has a single partition.
    """

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.turns = Turns()
        self.draws: dict[bool, bool] = {}  # by whether the model trains; no entry: unknown


class BatchRandomness:
    """Random numbers of one batch.

    Args:
        known: of the pipe.
        training: whether the pipe trains.
        num_microbatches: of this batch.
    """

    def __init__(self, known: Randomness, *, training: bool, num_microbatches: int) -> None:
        self._known = known
        self._training = training
        self._drawn = False
        self._in_order = known.alone or num_microbatches == 1
        self._begin = torch.get_rng_state()
        self._turns = not self._in_order and known.draws.get(training, True)
        self._begin_others = None if self._in_order or self._turns else RandomStates.now(quickly=True)
        self._seed = int(torch.randint(_SEEDS - 1, ()).item()) if self._turns else 0
        if self._turns:
            torch.set_rng_state(self._begin)

    def turn(self) -> AbstractContextManager[None]:
        """Around a call, where stages take turns."""
        return self._known.turns if self._turns else nullcontext()

    @contextmanager
    def forward(self, microbatch: int, stage: int, device: torch.device) -> Iterator[list[RandomState]]:
        """Around the forward of a stage, in its turn; the list has the state for its recomputation afterwards."""
        state: list[RandomState] = []
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        if not self._turns:
            before = torch.get_rng_state() if self._in_order else None
            python = RandomStates.now() if self._in_order else None
            yield state
            drew = before is not None and not torch.equal(before, torch.get_rng_state())
            drew_python = python is not None and RandomStates.now() != python
            state.append(RandomState(before if drew else None, on_device, python if drew_python else None))
            return
        others = torch.get_rng_state()
        torch.default_generator.manual_seed((self._seed + microbatch * _STAGES + stage) % _SEEDS)
        before, python = torch.get_rng_state(), RandomStates.now()
        try:
            yield state
            drew = not torch.equal(before, torch.get_rng_state())
        finally:
            torch.set_rng_state(others)
        drew_python = RandomStates.now() != python
        self._drawn |= drew or drew_python
        state.append(RandomState(before if drew else None, on_device, python if drew_python else None))

    @contextmanager
    def recomputation(self, state: RandomState, device: torch.device) -> Iterator[None]:
        """Around a recomputation: it draws the numbers of its forward."""
        if all(each is None for each in state):
            yield
            return
        with self._known.turns:
            others = torch.get_rng_state()
            on_device = torch.cuda.get_rng_state(device) if state.device is not None else None
            python = None if state.others is None else RandomStates.now()
            if state.others is not None:
                state.others.restore()
            if state.host is not None:
                torch.set_rng_state(state.host)
            if state.device is not None:
                torch.cuda.set_rng_state(state.device, device)
            try:
                yield
            finally:
                torch.set_rng_state(others)
                if python is not None:
                    python.restore()
                if on_device is not None:
                    torch.cuda.set_rng_state(on_device, device)

    def finish(self) -> bool:
        """After all forwards of the batch: whether numbers were drawn at the same time, perhaps by several stages."""
        if self._turns:
            self._known.draws[self._training] = self._drawn
            if self._drawn:
                torch.randint(_SEEDS - 1, ())  # so that the next batch has other seeds
        elif self._begin_others is not None:
            others = RandomStates.now(quickly=True)
            if others != self._begin_others or not torch.equal(self._begin, torch.get_rng_state()):
                self._known.draws[self._training] = True
                return True
        return False
