"""`Preemption`: SIGTERM and SIGUSR1 ask a run to save a checkpoint and to end, within a time limit.

    scheduler ──SIGTERM──> launcher ──SIGTERM──> every rank     a rank or torchrun's agent may get the signal too
                                                   │ notes it
                                                   ▼
    the sum over processes that ends each step tells all ranks in the same step; they save, and exit with `PREEMPTED`

A second signal to a process, at least `_REPEATED_SECONDS` after its first, ends it at once. Schedulers send the first
one to several processes of a run, which then pass it on: what comes sooner is the same request. torchrun's agent may
take longer to pass on a signal that the rank has got from the scheduler too.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from pipeloom.processes.black_box import HUNG, BlackBox
from pipeloom.processes.launching import torchrun

PREEMPTED = 75  # exit code, EX_TEMPFAIL of sysexits.h: a checkpoint was saved, run it again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
GROW = signal.SIGUSR2  # to the launcher of an elastic run: lost ranks may start again
_REPEATED_SECONDS = 1.0
_PASSED_ON_SECONDS = 15.0  # the same for the same signal under torchrun
_AGENT_SECONDS = 30.0  # from SIGTERM of torchrun's agent to its SIGKILL, unless the environment has another number
_AGENT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_BEFORE_KILL_SECONDS = 5.0  # a rank ends so much earlier, with a message, for which it asks other ranks
_AFTER_RANKS_SECONDS = 8.0  # so much longer than its ranks the launcher waits
_AGREED = 0  # in the pipe of signals: another process was asked


class Preemption:
    """Notes the signals that this process gets, and ends it where no checkpoint is complete in time.

    Python runs its signal handlers in the main thread, which may wait for another rank. A thread reads the signals from
    a pipe instead, which the handler of the interpreter writes as they come.

    Args:
        seconds: from the first signal to a complete checkpoint; 0: signals keep their effect.
        rank: of this process, for messages; None: it has all ranks.
        black_box: of a process that `launch` started, for its last words.

    Attributes:
        asked: whether this process has got a signal.
        agreed: whether all processes know, after the same step, that one was asked.
        saved: the checkpoint with which the run ends.
        ask_ranks: returns where the ranks are that hold up the others, and whether this process says so for all of
            them (`Watchdog.ask_late`); None: without a watchdog.
        lock, shared: for what the threads of a process that act as processes decide together.
    """

    def __init__(self, seconds: float = 0.0, rank: int | None = None, black_box: BlackBox | None = None) -> None:
        self._seconds, self._rank, self._black_box = seconds, rank, black_box
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._limited = True
        self._has_agent = torchrun.RUN in os.environ
        self.asked = self.agreed = False
        self.saved: Path | None = None
        self.ask_ranks: Callable[[], tuple[str, bool]] | None = None
        self.lock, self.shared = threading.Lock(), dict[str, Any]()

    def __enter__(self) -> Self:
        if self._seconds and threading.current_thread() is threading.main_thread():
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[1], False)
            self._thread = threading.Thread(
                target=self._watch, args=self._pipe[:1], name="pipeloom-signals", daemon=True
            )
            self._thread.start()
            self._other_pipe = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is None:
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._other_pipe)
        os.close(self._pipe[1])
        self._thread.join()
        os.close(self._pipe[0])
        self._pipe = None

    @property
    def listens(self) -> bool:
        """Whether a signal asks for a checkpoint."""
        return self._pipe is not None

    @property
    def _is_limited(self) -> bool:
        """Whether the time to save in is limited; not where more ranks are about to go on."""
        return self._limited and not (self._black_box is not None and self._black_box.grows)

    def agree(self) -> None:
        """All processes know now; the time limit of one that got no signal begins."""
        self.agreed = True
        if self._pipe is not None:
            os.write(self._pipe[1], bytes([_AGREED]))

    def ask_again(self) -> None:
        """The processes meet anew after a loss: if they had agreed, they agree again in their next step."""
        self.asked, self.agreed = self.asked or self.agreed, False
        self._limited = True

    def last_step_done(self) -> None:
        """The steps are complete: a signal no longer limits the time, and the run ends as usual."""
        self._limited = False

    def _watch(self, reader: int) -> None:
        first: tuple[float, str] | None = None
        own: tuple[float, int] | None = None  # this process's first signal, which may come behind those of others
        while True:
            left = None
            if first is not None and self._is_limited:
                left = max(0.0, first[0] + self._seconds - time.monotonic())
            if not select.select([reader], [], [], left)[0]:
                if self._is_limited and first is not None:
                    self._end_late(first[1])
                continue
            numbers = os.read(reader, 1024)
            if not numbers:
                return
            for number in numbers:
                if number not in (*SIGNALS, _AGREED):
                    continue
                name = "a signal to another rank" if number == _AGREED else signal.Signals(number).name
                now = time.monotonic()
                first = first or (now, name)
                if number == _AGREED:
                    continue
                self.asked, own = True, own or (now, number)
                passed_on = self._has_agent and number == own[1]
                if now > own[0] + (_PASSED_ON_SECONDS if passed_on else _REPEATED_SECONDS):
                    self._end(128 + number, f"ended by a second signal, {name}, without a checkpoint")

    def _end_late(self, name: str) -> NoReturn:
        """No checkpoint is complete in time after the signal of this name."""
        where, tells = ("", True) if self.ask_ranks is None else self.ask_ranks()
        text = (
            f"preempt_seconds={self._seconds:g}: no checkpoint was complete so long after {name}. "
            f"{where and where + '. '}Earlier checkpoints are unchanged: resume from the latest one."
        )
        if self._black_box is not None:  # the launcher prints the same text once, whichever rank ends first
            self._end(HUNG, text)
        if tells:
            self._end(1, text, named=not where)
        os._exit(1)

    def _end(self, code: int, text: str, *, named: bool = True) -> NoReturn:
        if self._black_box is not None:
            self._black_box.last_words = text
        else:
            name = f"rank {self._rank}: " if named and self._rank is not None else ""
            with suppress(OSError):
                os.write(2, f"pipeloom: error: {name}{text}\n".encode())
        os._exit(code)


def allowed_seconds(seconds: float, environment: Mapping[str, str]) -> float:
    """`seconds`, or as long as torchrun's agent waits from SIGTERM to SIGKILL, with time for a message."""
    if torchrun.RUN not in environment or not seconds:
        return seconds
    text = environment.get(_AGENT_VARIABLE, "")
    most = (float(text) if text.isdecimal() else _AGENT_SECONDS) - _BEFORE_KILL_SECONDS
    return min(seconds, max(most, 1.0))


class _Process(Protocol):
    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...


class _Rank(Protocol):
    @property
    def process(self) -> _Process: ...
    @property
    def black_box(self) -> BlackBox: ...


class Request:
    """The launcher's part: passes the first signal on to the ranks, which then save and end.

    A run that has begun keeps a signal that comes while ranks start after a loss, until all of them can save.

    Args:
        seconds: as of `Preemption`; 0: each signal ends the run.

    Attributes:
        signals: that the launcher has received and not looked at yet, with `GROW`. Its handlers add to this list: if
            they raised, a second signal would interrupt the clean-up.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds, self.signals = seconds, list[int]()
        self._first: tuple[float, int] | None = None
        self._end: int | None = None
        self._asked: list[_Process] = []

    @property
    def received(self) -> bool:
        """Whether a signal has come that asks for a checkpoint or ends the run."""
        return self._first is not None or self._end is not None or any(number != GROW for number in self.signals)

    def ask(self, ranks: Sequence[_Rank]) -> None:
        """Ask each rank once to save and to end: another signal to its process would end it."""
        for rank in ranks:
            if rank.process in self._asked:
                continue
            self._asked.append(rank.process)
            if rank.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGUSR1 if self._first is None else self._first[1])

    def ending(self, ranks: Sequence[_Rank], *, begun: bool) -> int | None:
        """The signal that ends the run now; None: there was none, or the ranks save, or will once they are ready.

        Args:
            ranks: of the run; empty while some of them start, or get ready to meet anew.
            begun: whether ranks that start go on with a run that has begun. Else a signal ends them, which have
                nothing to save.
        """
        now = time.monotonic()
        ready = bool(ranks) and all(rank.black_box.phase for rank in ranks)
        for number in [number for number in self.signals if number != GROW]:
            self.signals.remove(number)
            asks = bool(self.seconds) and number in SIGNALS
            if asks and self._first is None and (ready or begun):
                self._first = now, number
            elif self._end is None and (not asks or self._first is None or now > self._first[0] + _REPEATED_SECONDS):
                self._end = number
        if self._end is None and self._first is not None:
            if ready:
                self.ask(ranks)
            if now > self._first[0] + self.seconds + (_AFTER_RANKS_SECONDS if self._asked else 0.0):
                self._end = self._first[1]
        return self._end
