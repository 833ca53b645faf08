"""`Watchdog`: a thread in every rank that ends the run when ranks make no progress, and says which rank holds it up.

    rank 0                      rank 1                       rank 2
    no progress for `limit`     `while True` in a forward    no progress
      │ alarm ────────────────────▶ sees it at its next look ──▶ sees it
      │ report: waits for 1         │ report: waits for none     │ report: waits for 1
      ◀──────────────────────────────────────────────────────────┘
    verdict: rank 1             stack of all its threads

Ranks exchange reports through the store in which they met, never through the stuck threads. A rank that does not answer
is stopped, or a C call holds its interpreter lock. Progress is the clock of the rank's black box, which every action
writes. The peers that a rank waits for are read from its stack (`pipeloom.processes.waits`).
"""

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from pipeloom.common.process_place import children, stat_fields
from pipeloom.processes.black_box import ActionObserver, BlackBox
from pipeloom.processes.hang_board import HangBoard
from pipeloom.processes.hang_report import NoticeTimes, RankReport, Verdict, judge, late, notice, patient_seconds
from pipeloom.processes.launcher import HUNG, Membership
from pipeloom.processes.launching.torchrun import is_orphan
from pipeloom.processes.network.sockets import ConnectionLimits
from pipeloom.processes.waits import waited_for

_LEAST_SECONDS, _STEPS = 30.0, 5.0  # the limit where none is given: so many seconds, so many times the slowest step
BACKGROUND_THREAD = "pipeloom-save"  # name of threads that wait for other ranks, but not for the steps
_RECENT_STEPS = 20
_FIRST_STEPS = 2  # of a process, which compile and allocate
# The limit of an evaluation once one was seen: so many times the slowest of the last ones, and at least so long.
_TIMES_EVALUATION, _EVALUATION_SECONDS, _EVALUATION = 20.0, 60.0, "evaluation"
_WITHOUT_ACTIONS = ("checkpoint", "copy", "loading", "model", "report", "rewind")  # beginnings of phases
_NOTICE_SECONDS = 30.0  # without progress in a phase that may take long, until a line says where ranks are
_NOTICE_GAP_SECONDS = 60.0  # at least between two such lines
_LONGEST_LOOK, _SHORTEST_LOOK = 3.0, 0.1  # seconds between two looks
_ANSWER_SECONDS = 3.0  # how long other ranks may take to answer, beside one look
_LATE, _LATE_ANSWER_SECONDS = "late", 1.0  # the round of `ask_late`; as _ANSWER_SECONDS in it
_LINK_SECONDS = 10.0  # beyond a step's limit, until connections over which nothing comes back end in any phase
_LAST_SECONDS = 1.5  # for stacks of other ranks, before the run ends
_OWN_DIRECTORY = str(Path(__file__).parents[1])
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))


class Watchdog:
    """Ends the run where a rank makes no progress, and says which rank holds up the others, and where.

    Make it on every rank, after ``torch.distributed.init_process_group`` where there are several, and use it as a
    context manager. Its thread looks at the progress of this process. Without progress for `seconds`, every rank prints
    where it is: step, action, micro-batch, the ranks that it waits for. One line names the rank that waits for no other
    one, which prints its Python stack. Then all processes end with exit code 1; one that was stopped is killed if it
    runs on the same host as another rank. A process whose parent, such as torchrun's agent, has ended, ends too.

    Args:
        seconds: without progress inside a call of a `Pipeline` or `Stream`. It must be longer than the longest action
            and than the time that one rank spends between two calls while another one waits, see `paused`. None: 5
            times the slowest of the last 20 steps that `black_box` counts, at least 30 s.
        black_box: of this process; None: a new one.
        member: of the run that `pipeloom train` started; None: the default process group.
        always: whether the time outside of such calls counts too.
        name: of this rank in messages; None: its number.

    Attributes:
        black_box: what is watched. Pass ``blackbox=watchdog.blackbox`` to `Pipeline`.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        black_box: BlackBox | None = None,
        member: Membership | None = None,
        always: bool = False,
        name: str | None = None,
    ) -> None:
        self.black_box = BlackBox() if black_box is None else black_box
        self._seconds, self._member, self._always = seconds, member, always
        self._parent, self._thread_id = os.getppid(), threading.get_ident()
        self._orphan = is_orphan(os.environ)
        self._board = HangBoard(name)
        # NCCL does not take what it is sent before it is asked to, which would count as a connection without an answer.
        self._limits = ConnectionLimits() if always and self._board.size > 1 and "nccl" not in _backends() else None
        self._closed = threading.Event()
        self._stuck, self._round = 0.0, 0
        self._stopped, self._num_stops = set[int](), 0  # processes of this host that are stopped now; how often any was
        self._dump_limit = math.inf  # after which all stacks are dumped
        self._dump_lock = threading.RLock()
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluation_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._evaluates_since: float | None = None
        self._notices, self._num_notices = NoticeTimes(_NOTICE_SECONDS, _NOTICE_GAP_SECONDS), 0
        self._thread = threading.Thread(target=self._watch, name="pipeloom-watchdog", daemon=True)

    @property
    def blackbox(self) -> memoryview | ActionObserver:
        """The buffer for `Pipeline`, in which it notes its actions."""
        return self.black_box.action_buffer

    def __enter__(self) -> Self:
        self._thread.start()
        if self._always:
            self.black_box.on_progress = self._renew_limit
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.black_box.on_progress = None
        self._closed.set()
        if self._always:  # here: a process forked while the timer runs could never set one
            with self._dump_lock:
                faulthandler.cancel_dump_traceback_later()
        self._board.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """This rank may take as long as it likes inside the block, such as to save a checkpoint; others wait for it."""
        before = self.black_box.patient
        self.black_box.patient = math.inf
        try:
            yield
        finally:
            self.black_box.patient, self.black_box.clock = before, time.perf_counter()
            if self._always:
                self._renew_limit()

    def ask_late(self) -> tuple[str, bool]:
        """Where the ranks are that hold up the others, as no checkpoint is complete in time and the run ends.

        Any thread of any rank may call this.

        Returns:
            The same words on all ranks that call, and whether this one is the first of them.
        """
        self.black_box.ending = 1.0
        report, patience = self._report_late(), _LATE_ANSWER_SECONDS + self._look_seconds
        leads = self._board.claim(_LATE)
        if not leads and (found := self._board.verdict(_LATE, patience + _LATE_ANSWER_SECONDS)) is not None:
            return found.line, False
        line = late(*self._answers(_LATE, report, patience if leads else 0.0))
        self._board.decide(_LATE, Verdict((), line))
        return line, True

    def _report_late(self) -> RankReport:
        report = replace(self._report(), seconds=time.perf_counter() - self.black_box.clock)
        self._board.report(_LATE, report.to_json())
        return report

    # The thread

    @property
    def _step_limit(self) -> float:
        """Seconds without progress in a step, after which this rank counts as hung."""
        slowest = max(self._step_seconds, default=0.0)
        return max(_LEAST_SECONDS, _STEPS * slowest) if self._seconds is None else self._seconds

    @property
    def _limit(self) -> float:
        """Seconds without progress, after which this rank counts as hung in its phase."""
        limit = self._step_limit
        if self.black_box.patient == math.inf:
            return math.inf
        first = self._always and self.black_box.steps < _FIRST_STEPS
        if not (self.black_box.patient or first):
            return limit
        patient = patient_seconds(self._seconds, limit)
        slowest = max(self._evaluation_seconds, default=0.0)
        if first or not slowest or not self.black_box.phase.startswith(_EVALUATION):
            return patient
        return min(patient, max(_EVALUATION_SECONDS, limit, _TIMES_EVALUATION * slowest))

    @property
    def _look_seconds(self) -> float:
        return min(max((self._seconds or _LEAST_SECONDS) / 10, _SHORTEST_LOOK), _LONGEST_LOOK)

    def _watch(self) -> None:
        clock, steps, at = self.black_box.clock, self.black_box.steps, time.monotonic()
        step_began = at
        while not self._closed.wait(self._look_seconds):
            before, at = at, time.monotonic()
            if self._orphan or os.getppid() != self._parent:  # torchrun's agent has ended
                self._say(f"{self._board.name}: its parent process has ended, and this process ends too")
                os._exit(1)
            if (done := self.black_box.steps) != steps:
                if 1 <= steps < done:  # else a new beginning
                    self._step_seconds.append((at - step_began) / (done - steps))
                steps, step_began = done, at
            # The clock of a stopped or starved process does not count.
            self._stuck += min(at - before, 2 * self._look_seconds)
            if self.black_box.clock != clock:
                clock, self._stuck, self._stopped = self.black_box.clock, 0.0, set()
            limit = self.black_box.limit_seconds = self._limit
            self._dump_later(limit)
            if self._limits is not None:
                self._limits.apply(self._step_limit + _LINK_SECONDS)
            if self._board.is_alarmed(_LATE):
                self._report_late()
            alarmed = self._board.is_alarmed(self._round)
            if alarmed or (self._stuck >= limit and (self._always or self._in_call())):
                self._confer()
            elif self._always:
                patient = self._step_limit < limit < math.inf
                if patient and self._stuck > self._look_seconds:
                    self._tell_of_stopped(limit)
                self._tell_of_ranks(patient=patient)

    def _tell_of_ranks(self, *, patient: bool) -> None:
        """Say where all ranks are that make no progress, if it is time and no other rank does; answer one that does."""
        now, number = time.monotonic(), f"notice-{self._num_notices}"
        due = patient and self._notices.is_due(self.black_box.phase, self._stuck, now)
        if not due and not self._board.is_alarmed(number):
            return
        self._num_notices += 1
        self._notices.take_part(self._stuck, now)
        report, board = self._report(), self._board
        board.report(number, report.to_json())
        if not board.claim(number):
            return
        answers, silent = self._answers(number, report, _ANSWER_SECONDS + self._look_seconds)
        if board.answers and (line := notice(answers, silent, self._notices)) and not self._closed.is_set():
            self._say(line)

    def _tell_of_stopped(self, limit: float) -> None:
        """Warn of ranks on this host that are stopped in a phase which may take long; the launcher does so itself."""
        if self._member is not None and self._member.launched:
            return
        stopped = {process for process in children(self._parent) if (stat_fields(process) or "?")[0] in "Tt"}
        for process in stopped - self._stopped:
            self._num_stops += 1
            if (
                self._board.claim(f"stop-{process}-{self._num_stops}")
                and (place := self._board.place_of(process)) is not None
            ):
                self._say(
                    f"warning: {place.name} (process {process}) is stopped by SIGSTOP or a debugger; the run waits for "
                    f"it, and ends after {limit:g} s without progress. Continue it with `kill -CONT {process}`."
                )
        self._stopped = stopped

    def _dump_later(self, limit: float) -> None:
        """Dump all stacks unless called again: a C call that holds the interpreter lock also holds this thread."""
        if not self._always:
            return
        with self._dump_lock:
            if self._closed.is_set():
                return
            self._dump_limit = limit
            faulthandler.cancel_dump_traceback_later()
            if limit < math.inf:
                faulthandler.dump_traceback_later(limit + _LAST_SECONDS, file=2)

    def _renew_limit(self) -> None:
        """As a phase begins: its limit holds at once, also if its first call stops this thread too."""
        self._time_evaluation()
        limit = self.black_box.limit_seconds = self._limit
        if limit < self._dump_limit:
            self._dump_later(limit)

    def _time_evaluation(self) -> None:
        """Note how long the evaluation took that ends as another phase begins; those of another layout do not count."""
        now, box = time.perf_counter(), self.black_box
        if self._evaluates_since is not None:
            self._evaluation_seconds.append(now - self._evaluates_since)
        self._evaluates_since = now if box.phase.startswith(_EVALUATION) else None
        if box.steps < _FIRST_STEPS:
            self._evaluation_seconds.clear()

    def _confer(self) -> None:
        """Ask all ranks; end the run, unless the rank that holds up the others is busy."""
        patience = _ANSWER_SECONDS + self._look_seconds
        self._dump_later(max(self._limit, patience))  # such a call may also begin now
        number, self._round = self._round, self._round + 1
        report, board = self._report(), self._board
        board.report(number, report.to_json())
        leads = board.claim(number)
        if leads:
            verdict = self._judge(number, report, patience)
            board.decide(number, verdict)
        else:
            found = board.verdict(number, 2 * patience)
            verdict = self._judge(number, report, 0.0) if found is None else found
        if verdict.line and not self._closed.is_set():
            self._end(report, verdict, leads=leads)
        self._stuck = min(self._stuck, self._limit / 2)

    def _judge(self, number: int, report: RankReport, patience: float) -> Verdict:
        answers, silent = self._answers(number, report, patience)
        if not self._board.answers:
            return judge([report], {}, self._limit, self._board.unreachable)
        return judge(answers, silent, self._limit)

    def _answers(
        self, number: int | str, report: RankReport, patience: float
    ) -> tuple[list[RankReport], dict[int, str]]:
        """The reports of a round by rank, this one's too, and a sentence about each rank that has none."""
        answers = {report.rank: report}
        answers |= {r.rank: r for r in map(RankReport.from_json, self._board.reports(number, patience))}
        missing = sorted({*range(self._board.size)} - answers.keys())
        return [answers[rank] for rank in sorted(answers)], {rank: self._board.describe(rank) for rank in missing}

    def _end(self, report: RankReport, verdict: Verdict, *, leads: bool) -> None:
        faulthandler.cancel_dump_traceback_later()
        self.black_box.ending = 1.0
        self._say(str(report))
        if report.rank in verdict.culprits or not verdict.culprits:
            self._say(f"{report.name}: Python stack")
            faulthandler.dump_traceback(file=2, all_threads=True)
        time.sleep(_LAST_SECONDS if leads else 2 * _LAST_SECONDS)
        launched = self._member is not None and self._member.launched
        if launched:  # the launcher prints the line, and ends all ranks
            self.black_box.last_words = verdict.line
            os._exit(HUNG)
        if leads:
            self._say(f"error: {verdict.line}")
        for rank in verdict.culprits:
            if rank != report.rank and (place := self._board.place(rank)) is not None and place.is_near:
                with suppress(OSError):
                    if place.state() is not None:
                        os.kill(place.process, signal.SIGKILL)
        os._exit(1)

    def _report(self) -> RankReport:
        frames = sys._current_frames()
        main = frames.pop(self._thread_id, None)
        frames.pop(threading.get_ident(), None)
        joined = self.black_box.phase.startswith("checkpoint")  # the steps wait for the save before
        for thread in threading.enumerate():  # else a save in the background waits for other saves, not for the steps
            if thread.name == BACKGROUND_THREAD and not joined:
                frames.pop(thread.ident or 0, None)
        waits = waited_for(main)
        if waits is None:  # autograd calls hooks in threads of its own
            waits = next((found for found in map(waited_for, frames.values()) if found is not None), None)
        box, limit = self.black_box, self._limit
        action = "" if box.phase.startswith(_WITHOUT_ACTIONS) else box.action  # that of a step before
        hung = self._stuck >= limit / 2 and box.patient != math.inf
        return RankReport(
            self._board.rank, self._board.name, box.phase, action, self._stuck, waits, _line(main), hung, limit
        )

    def _in_call(self) -> bool:
        """Whether the watched thread is inside pipeloom."""
        frame = sys._current_frames().get(self._thread_id)
        while frame is not None:
            if frame.f_code.co_filename.startswith(_OWN_DIRECTORY):
                return True
            frame = frame.f_back
        return False

    def _say(self, text: str) -> None:
        with suppress(OSError):  # whoever read it has ended
            os.write(2, f"pipeloom: {text}\n".encode())  # the stuck thread may hold the lock of sys.stderr


def _backends() -> str:
    return dist.get_backend_config() if dist.is_initialized() else ""


def _line(frame: FrameType | None) -> str:
    """The innermost line of a stack outside torch and the standard library."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if (frame := frame or innermost) is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
