"""`BlackBox`: a page of memory with a rank's step, action, progress and error, which outlives the rank."""

import mmap
import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from pipeloom.ir import Action

LABEL_BYTES = 64  # size of the label of the running action
HUNG = 4  # exit code of ranks that name the one which holds up the others, in their last words
BLACKBOX_BYTES = LABEL_BYTES + 8  # of the label, and of the time when the action started
_CLOCK, _STEPS, _PATIENT, _LIMIT, _ENDING, _READY, _GROWS, _COMPLETE = range(8)  # float64 numbers behind the label
_NUMBERS_END = LABEL_BYTES + 8 * 8


def label_of(action: Action) -> bytes:
    """The label of `action` in a black box, padded with NULs."""
    return f"{action}".encode().ljust(LABEL_BYTES, b"\0")[:LABEL_BYTES]


class ActionObserver(bytearray, ABC):
    """A buffer for the label of the running action, in place of a black box's, that receives what begins."""

    def __init__(self) -> None:
        super().__init__(BLACKBOX_BYTES)

    def __setitem__(self, where: Any, label: Any) -> None:
        self.begins(bytes(label).rstrip(b"\0").decode())

    @abstractmethod
    def begins(self, action: str) -> None:
        """`action`, such as ``1B3``, is about to run."""

    def enters(self, phase: str) -> None:
        """`phase`, such as ``step 12``, begins. A `BlackBox` calls this for its observer."""


class _Text:
    """A text in one part of the page, on one line; the part ends it where it is too long."""

    def __init__(self, start: int, stop: int) -> None:
        self.place = slice(start, stop)

    def __get__(self, box: "BlackBox", kind: type[Any] | None = None) -> str:
        return box.page[self.place].split(b"\0", 1)[0].decode(errors="replace")

    def __set__(self, box: "BlackBox", text: str) -> None:
        size = self.place.stop - self.place.start
        box.page[self.place] = " ".join(text.split()).encode()[: size - 1].ljust(size, b"\0")


class _Number:
    """A float64 number of the page, which is written in one piece."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __get__(self, box: "BlackBox", kind: type[Any] | None = None) -> float:
        return box.numbers[self.index]

    def __set__(self, box: "BlackBox", value: float) -> None:
        box.numbers[self.index] = value


class BlackBox:
    """A page of memory that a rank shares with the launcher. It outlives the rank.

    Args:
        descriptor: of a file of `SIZE` bytes; -1: of an anonymous file of this process.
        writable: whether this process writes.

    Attributes:
        descriptor: of the file, by which processes of the same user read it: ``/proc/PROCESS/fd/DESCRIPTOR``.
        action: the last action, such as ``1B3``; empty before the first.
        phase: the rank's current phase, such as ``step 12``.
        last_words: the error that ended the rank.
        clock: when the last action, phase or part of a phase began (time.perf_counter, seconds): it changes with all
            progress.
        steps: number of steps that this process has completed.
        patient: 1 in a phase that may make no progress for long, such as a save, else 0.
        limit_seconds: without progress, after which the rank counts as hung; 0: it is not watched.
        ending: 1 once the watchdog ends the process, else 0.
        ready: the generation of the run's ranks that this process can join (`processes/recovery/`).
        grows: 1 where the launcher has asked this rank to save and to end, so that more ranks go on (`--elastic`).
        complete: 1 once the rank has done its work, before its process ends, else 0.
        observer: receives actions and phases as they begin; None, as in ordinary runs: nothing does.
        on_progress: called in the thread that trains, as a phase begins and as a step is complete; None: nothing is.
    """

    SIZE = 4096
    action, phase, last_words = _Text(0, LABEL_BYTES), _Text(128, 256), _Text(256, SIZE)
    clock, steps, patient = _Number(_CLOCK), _Number(_STEPS), _Number(_PATIENT)
    limit_seconds, ending = _Number(_LIMIT), _Number(_ENDING)
    ready, grows, complete = _Number(_READY), _Number(_GROWS), _Number(_COMPLETE)

    def __init__(self, descriptor: int = -1, *, writable: bool = True) -> None:
        if descriptor < 0 and hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("pipeloom-black-box")
            os.ftruncate(descriptor, self.SIZE)
            weakref.finalize(self, os.close, descriptor)
        self.descriptor = descriptor
        self.page = mmap.mmap(descriptor, self.SIZE, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.numbers = memoryview(self.page)[LABEL_BYTES:_NUMBERS_END].cast("d")
        self.observer: ActionObserver | None = None
        self.on_progress: Callable[[], None] | None = None

    @property
    def action_buffer(self) -> memoryview | ActionObserver:
        """The part for the label of the running action and its start, `BLACKBOX_BYTES` long, or the observer."""
        return memoryview(self.page)[:BLACKBOX_BYTES] if self.observer is None else self.observer

    def enter(self, phase: str, *, patient: bool) -> None:
        """A phase begins; see `patient`."""
        self.phase, self.patient, self.clock = phase, float(patient), time.perf_counter()
        if self.observer is not None:
            self.observer.enters(phase)
        self._progress()

    def progressed(self, phase: str = "") -> None:
        """A part of the phase is done, such as a tensor of a checkpoint; counts if the phase begins with `phase`."""
        if self.phase.startswith(phase):
            self.clock = time.perf_counter()

    def count_step(self) -> None:
        """A step is complete."""
        self.steps += 1
        self.clock = time.perf_counter()
        self._progress()

    def _progress(self) -> None:
        if self.on_progress is not None:
            self.on_progress()
