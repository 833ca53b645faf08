"""`Striker`: watches a run from outside, strikes it, and notes its steps. It does the same to every system."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.reliability.faults import DAMAGE, Fault
from benchmarks.reliability.systems import System

from pipeloom.chaos import leftovers
from pipeloom.common.process_place import PROCESSES_NAME, stat_fields

_POLL_SECONDS = 0.002
_BUSY_SECONDS = 2.0  # of processor time: processes that take it live, such as those that import torch


class Striker(threading.Thread):
    """Runs beside one attempt.

    Args:
        system: what is run.
        output_dir: of the run.
        fault: what to do; None: only watch.
        seconds: of a step, and of a save.
        cap_seconds: after so long without a new step or 2 s of processor time, all processes are ended.

    Attributes:
        struck_at: when the fault struck (time.monotonic, seconds); None: it has not.
        in_save: whether the checkpoint was incomplete at the strike.
        steps: the newest step in the metrics, each time that they changed, with the time (time.monotonic, seconds).
        save_seconds: the longest save that was seen.
        given_up: whether all processes were ended.
    """

    def __init__(
        self, system: System, output_dir: Path, fault: Fault | None, seconds: tuple[float, float], cap_seconds: float
    ) -> None:
        super().__init__(daemon=True)
        self._system, self._output_dir, self._fault, self._cap_seconds = system, output_dir, fault, cap_seconds
        self._step_seconds, self._save_seconds = seconds
        self._metrics = output_dir / "metrics.jsonl"
        self._seen = self._stamp()
        self._known = set(leftovers.children())
        self._stopped = threading.Event()
        self.struck_at: float | None = None
        self.in_save = False
        self.steps: list[tuple[float, int]] = []
        self.save_seconds = 0.0
        self.given_up = False
        self._used = self._used_at = self._looked_at = 0.0

    def run(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            self._look()
            if self._fault is None:
                self._time_save()
            elif self.struck_at is None:
                self._strike_if_due(self._fault)
            elif not self.given_up and not self._lives(self.struck_at):
                self.given_up = True
                leftovers.end(leftovers.descendants())

    def stop(self) -> None:
        """To be called when the attempt has ended."""
        self._stopped.set()
        self.join()
        self._look()

    def _lives(self, struck_at: float) -> bool:
        """Whether there was a sign of life within the cap."""
        now = time.monotonic()
        if now > self._looked_at + 1.0:
            self._looked_at = now
            used = sum(map(_processor_seconds, leftovers.descendants()))
            if abs(used - self._used) > _BUSY_SECONDS:  # less: processes have ended
                self._used, self._used_at = used, now
        return now < max(struck_at, self.steps[-1][0], self._used_at) + self._cap_seconds

    def _look(self) -> None:
        if (stamp := self._stamp()) == self._seen:
            return
        with suppress(OSError, ValueError, IndexError):  # the last line may be half written
            *_, last, rest = self._metrics.read_bytes().split(b"\n")
            if not rest:
                self.steps.append((time.monotonic(), json.loads(last)["step"]))
                self._seen = stamp

    def _stamp(self) -> tuple[int, int]:
        with suppress(OSError):
            found = self._metrics.stat()
            return found.st_size, found.st_mtime_ns
        return 0, 0

    def _time_save(self) -> None:
        """How long the first save takes."""
        step = self._system.save_steps
        if not self.save_seconds and self._system.saving(self._output_dir, step):
            began = time.monotonic()
            while step not in self._system.complete(self._output_dir) and not self._stopped.wait(_POLL_SECONDS):
                pass
            self.save_seconds = time.monotonic() - began

    def _strike_if_due(self, fault: Fault) -> None:
        if fault.kind == "save-kill":
            due, seconds = self._system.saving(self._output_dir, fault.step), self._save_seconds
        else:
            due, seconds = bool(self.steps) and self.steps[-1][1] >= fault.step, self._step_seconds
        if not due:
            return
        time.sleep(fault.part * seconds)
        launcher = min(set(leftovers.children()) - self._known)
        ranks = _ranks(self._output_dir, launcher)
        self.in_save = fault.step not in self._system.complete(self._output_dir)
        self._look()
        self.struck_at = time.monotonic()
        if fault.kind in DAMAGE:
            leftovers.end(leftovers.descendants())
        elif fault.kind in ("preempt", "agent-kill"):
            os.kill(launcher, signal.SIGTERM if fault.kind == "preempt" else signal.SIGKILL)
        else:
            os.kill(ranks[fault.rank], signal.SIGSTOP if fault.kind == "hang" else signal.SIGKILL)


def _processor_seconds(process: int) -> float:
    fields = stat_fields(process)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _ranks(output_dir: Path, launcher: int) -> dict[int, int]:
    """The processes of the ranks: those that the run has listed, or else the launcher's children with a RANK."""
    listed = output_dir / PROCESSES_NAME
    if listed.exists():
        return {rank: row["process"] for rank, row in enumerate(json.loads(listed.read_text()))}
    return {_rank(child): child for child in leftovers.children(launcher)}


def _rank(process: int) -> int:
    """The rank of a process; -1: it is none."""
    with suppress(OSError):
        for word in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if word.startswith(b"RANK="):
                return int(word[5:])
    return -1
