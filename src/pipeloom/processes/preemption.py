"""`Preemption`: SIGTERM and SIGUSR1 ask a run to save a checkpoint and to end, within a time limit.

    scheduler ──SIGTERM──> launcher ──SIGUSR1──> every rank     a rank or torchrun's agent may get the signal too
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

from pipeloom.processes.black_box import BlackBox

PREEMPTED = 75  # exit code, EX_TEMPFAIL of sysexits.h: a checkpoint was saved, run it again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_REPEATED_SECONDS = 1.0
_PASSED_ON_SECONDS = 15.0  # the same for the same signal under torchrun
_AGENT_SECONDS = 30.0  # from SIGTERM of torchrun's agent to its SIGKILL, unless the environment has another number
_TORCHRUN = "TORCHELASTIC_RUN_ID"  # variable of its ranks
_AGENT_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
_BEFORE_KILL_SECONDS = 2.0  # a rank ends so much earlier, with a message
_AFTER_RANKS_SECONDS = 5.0  # so much longer than its ranks the launcher waits
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
        lock, shared: for what the threads of a process that act as processes decide together.
    """

    def __init__(self, seconds: float = 0.0, rank: int | None = None, black_box: BlackBox | None = None) -> None:
        self._seconds, self._rank, self._black_box = seconds, rank, black_box
        self._previous: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._limited = True
        self._has_agent = _TORCHRUN in os.environ
        self.asked = self.agreed = False
        self.saved: Path | None = None
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
                    self._end(
                        1,
                        f"preempt_seconds={self._seconds:g}: no checkpoint was complete so long after {first[1]}. "
                        "Earlier checkpoints are unchanged: resume from the latest one.",
                    )
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

    def _end(self, code: int, text: str) -> NoReturn:
        if self._black_box is not None:
            self._black_box.last_words = text
        else:
            name = "" if self._rank is None else f"rank {self._rank}: "
            with suppress(OSError):
                os.write(2, f"pipeloom: error: {name}{text}\n".encode())
        os._exit(code)


def allowed_seconds(seconds: float, environment: Mapping[str, str]) -> float:
    """`seconds`, or as long as torchrun's agent waits from SIGTERM to SIGKILL, with time for a message."""
    if _TORCHRUN not in environment or not seconds:
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
    """The launcher's part: passes the first signal on to its ranks.

    Args:
        seconds: as of `Preemption`; 0: each signal ends the run.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_seen = 0
        self._since: float | None = None
        self._from_launcher = False

    def ask(self, ranks: Sequence[_Rank], *, from_launcher: bool = True) -> None:
        """Ask the ranks to save and to end; by the launcher itself, or for a signal."""
        self._since, self._from_launcher = time.monotonic(), from_launcher
        for rank in ranks:
            if rank.process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(rank.process.pid, signal.SIGUSR1)

    def ending(self, signals: Sequence[int], ranks: Sequence[_Rank]) -> int | None:
        """The signal that ends the run now; None: there was none, or the ranks have it and may save."""
        now = time.monotonic()
        for number in signals[self._num_seen :]:
            self._num_seen += 1
            asks = bool(self._seconds) and number in SIGNALS
            if asks and self._since is None and ranks and all(rank.black_box.phase for rank in ranks):
                self.ask(ranks, from_launcher=False)
            elif asks and self._from_launcher:  # they save already
                self._since, self._from_launcher = now, False
            elif not asks or self._since is None or now > self._since + _REPEATED_SECONDS:
                return number
        limited = self._since is not None and not self._from_launcher
        late = limited and now > (self._since or 0.0) + self._seconds + _AFTER_RANKS_SECONDS
        return signals[0] if late else None
