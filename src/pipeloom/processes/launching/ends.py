"""How ranks of the launcher ended or were stopped, in words; and how the launcher ends them. No torch."""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from pipeloom.errors import listed
from pipeloom.processes.black_box import HUNG as HUNG
from pipeloom.processes.launching.ranks import Rank
from pipeloom.processes.recovery.lifeline import PEER_LOST

_HINTS = {
    int(signal.SIGKILL): "out of memory?",
    int(signal.SIGBUS): "is a disk or /dev/shm full, or a file shorter than before?",
}
_WATCHDOG_SECONDS = 15.0  # how much longer than a rank's limit its watchdog may take to end the run


class Stops:
    """Tells of ranks that were stopped, for which the other ranks wait."""

    def __init__(self) -> None:
        self._since: dict[Rank, float] = {}

    def look(self, ranks: Sequence[Rank]) -> str | None:
        """Print a warning for each rank that was stopped since the last call.

        Returns:
            An error where a rank is stopped for longer than its watchdog waits, and than watchdogs of others need to
            say so: they may be stopped too.
        """
        for rank in ranks:
            number, found = rank.process.pid, None
            if rank.process.returncode is None:
                with suppress(ChildProcessError):  # it ended just now
                    found = os.waitid(os.P_PID, number, os.WSTOPPED | os.WCONTINUED | os.WNOHANG)
            limit = rank.black_box.limit_seconds
            if found is not None and found.si_code == os.CLD_CONTINUED:
                self._since.pop(rank, None)
            elif found is not None:
                self._since[rank] = time.monotonic()
                ends = f", and ends after {limit:g} s without progress" if 0 < limit < math.inf else ""
                name = signal_name(found.si_status)
                sys.stderr.write(
                    f"pipeloom: warning: {rank.name} (process {number}) was stopped by {name}; the run waits for it"
                    f"{ends}. Continue it with `kill -CONT {number}`.\n"
                )
                sys.stderr.flush()
            since = self._since.get(rank)
            if since is not None and 0 < limit < time.monotonic() - since - _WATCHDOG_SECONDS:
                where = f" in {rank.black_box.phase}" if rank.black_box.phase else ""
                return (
                    f"error: {rank.name} (process {number}) was stopped{where} for more than {limit:g} s; all ranks "
                    "were ended"
                )
        return None


def early_exits(ranks: Sequence[Rank], codes: Sequence[int | None]) -> dict[int, int]:
    """The ranks that ended with exit code 0 before their work was complete, such as by ``sys.exit(0)`` in a model."""
    return {rank: 0 for rank, code in enumerate(codes) if code == 0 and not ranks[rank].black_box.complete}


def explain(ranks: Sequence[Rank], lost: Mapping[int, int]) -> tuple[int, str]:
    """The exit code, and a line with the rank that failed first, how, and in which step and action."""
    rank = _first_to_fail(lost)
    code, box = lost[rank], ranks[rank].black_box
    if code == 2 and box.last_words:
        return 2, f"error: {box.last_words}"
    if code == HUNG:
        return 1, f"error: {box.last_words} All ranks were ended."
    text = ending(ranks, lost)
    return 1, f"error: {text} All ranks were ended." if text.endswith(".") else f"error: {text}; all ranks were ended"


def _first_to_fail(lost: Mapping[int, int]) -> int:
    """The likeliest cause: hung, killed, invalid input, failed or ended too early, lost a peer."""
    order = {HUNG: -1, 2: 1, PEER_LOST: 3}
    return min(lost, key=lambda rank: 0 if lost[rank] < 0 else order.get(lost[rank], 2))


def ending(ranks: Sequence[Rank], lost: Mapping[int, int]) -> str:
    """Which rank failed first, how, and in which step and action; and which others were killed."""
    rank = _first_to_fail(lost)
    code, name, box = lost[rank], ranks[rank].name, ranks[rank].black_box
    where = f" in {box.phase or 'its start'}" + (f", last action {box.action}" if box.action else "")
    if not code:
        return f"{name} ended with exit code 0{where}, before the run was complete"
    if code > 0:
        return f"{name} failed{where}: {box.last_words or f'exit code {code}'}"
    hint = f" ({_HINTS[-code]})" if -code in _HINTS else ""
    text = f"{name} was killed by {signal_name(-code)}{hint}{where}"
    others = [f"{ranks[each].name} by {signal_name(-lost[each])}" for each in lost if lost[each] < 0 and each != rank]
    return f"{text}; also killed: {listed(others)}" if others else text


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_all(ranks: Sequence[Rank]) -> None:
    """End every rank that still runs, with its children; return when all are gone."""
    for rank in ranks:
        if rank.process.returncode is None:
            for end, number in ((os.killpg, signal.SIGTERM), (os.kill, signal.SIGKILL)):  # a rank may take SIGTERM
                with suppress(ProcessLookupError, PermissionError):  # for a request to save
                    end(rank.process.pid, number)
    for rank in ranks:
        rank.process.wait()
