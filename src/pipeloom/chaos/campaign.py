"""`Campaign`: a reference run, and a run per fault, which is resumed as a user would, and compared. No torch."""

import re
import shutil
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pipeloom.chaos import leftovers
from pipeloom.chaos.attempt import Attempt, run_attempt
from pipeloom.chaos.comparison import Outcome, compare
from pipeloom.chaos.draw import draw_faults
from pipeloom.chaos.fault import BY_ITSELF, ELASTIC, KINDS, Fault, Order
from pipeloom.chaos.flip import flip_bit
from pipeloom.chaos.record import Strike
from pipeloom.common.quantities import counted
from pipeloom.errors import RunError
from pipeloom.processes.launching.parents import adopting
from pipeloom.train.checkpoint.directory import list_checkpoints
from pipeloom.train.checkpoint.manifest import verify
from pipeloom.train.output.reporters import row_of

_MOST_ATTEMPTS = 4
_RESTARTS = 3  # of torchrun
_TIMES_LONGER = 10.0  # than the reference run, and some seconds: then an attempt is ended
_LEAST_SECONDS = 120.0
_SPOKEN_BY = re.compile(r"pipeloom: (?:error: )?(?:\w+Error: )?rank (\d+)(?: in step|: )")
_LOADED = re.compile(r"(?<=^loading ).*/")  # the directory of a checkpoint
_OTHER_LAYOUT = 1e-3  # how much losses and gradient norms may differ after steps with another layout
_FEWER = re.compile(r"  (goes on from .*) with this layout; (\d+ steps? again)")
_IN_PLACE = re.compile(r"  recovered: .*; all ranks went (back to .*; \d+ steps? again)")
_RESUMED = re.compile(r"from \S*checkpoint-(\d+)")


@dataclass(frozen=True, slots=True)
class Job:
    """The training job that is hurt.

    Attributes:
        options: of `pipeloom train`.
        num_processes: of the run.
        launcher: what starts its ranks.
        patient_seconds: how long a hang may last in the first steps and in evaluations; 0: none strikes there.
    """

    options: tuple[str, ...]
    num_processes: int
    launcher: Literal["own", "torchrun"] = "own"
    patient_seconds: float = 0.0

    def command(self, output_dir: Path, more: Sequence[str] = (), restarts: int = _RESTARTS) -> list[str]:
        """The command that starts the job, and that goes on with it after a fault.

        Args:
            more: options.
            restarts: how often torchrun starts the ranks again.
        """
        own = ["-m", "pipeloom", "train", *self.options, *more, f"--output_dir={output_dir}"]
        own.append("--resume_from_checkpoint=auto")
        if self.launcher == "own":
            return [sys.executable, *own]
        agent = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.num_processes}"]
        return [sys.executable, *agent, f"--max-restarts={restarts}", *own]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one fault; seconds count from the strike.

    Attributes:
        number: of the fault, from 1.
        fault: what was injected.
        where: phase and action or file operation that it struck; None: its place was not reached.
        noticed_by: the process that reported it first; empty: none.
        noticed_seconds: until then.
        notice: the line.
        ended_seconds: until all processes of the hurt attempt had ended.
        recovered: how the run went on.
        again_seconds: until the first step after it was complete; None: the run was not started again.
        attempts: how often the run was started.
        outcome: comparison with the reference run; None: the run was never completed.
        left: what the attempts left behind.
        named_factor: of `slow`: how many times slower the run said that the rank computes forwards; None: it did not.
        measured_factor: of `slow`: how many times slower it did, as the injector measured it: beside a slow rank others
            wait, so it has more of a core that they share.
    """

    number: int
    fault: Fault
    where: str | None
    noticed_by: str
    noticed_seconds: float | None
    notice: str
    ended_seconds: float | None
    recovered: str
    again_seconds: float | None
    attempts: int
    outcome: Outcome | None
    left: tuple[str, ...]
    named_factor: float | None = None
    measured_factor: float | None = None

    @property
    def good(self) -> bool:
        """Whether the run came out as the reference run, by itself if it should, and left nothing behind."""
        by_itself = self.attempts == 1 or self.fault.kind not in BY_ITSELF
        return self.outcome is not None and self.outcome.equal and not self.left and by_itself


class Campaign:
    """One reference run, and one per fault.

    Args:
        job: the training job.
        out: directory of the runs. Those that come out right are deleted.
    """

    def __init__(self, job: Job, out: Path) -> None:
        self._job, self._out = job, out
        self.reference_seconds = 0.0

    def run(self, count: int, seed: int, kinds: Sequence[str]) -> Iterator[Result]:
        """The result of each fault as it becomes known.

        Raises:
            InputError: the run has no place for a kind.
            RunError: the reference run failed.
        """
        with adopting():
            reference, began = self._out / "reference", time.monotonic()
            first = self._attempt("reference", reference, 1, None, _LEAST_SECONDS * 10)
            self.reference_seconds = time.monotonic() - began
            if first.code != 0:
                words = [line.text for line in first.lines if "error" in line.text][-1:]
                raise RunError(f"the reference run failed with exit code {first.code}: {' '.join(words)}")
            checkpoint = list_checkpoints(reference)[-1].path
            sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
            verify(checkpoint)
            torchrun = self._job.launcher == "torchrun"
            long_hangs = self._job.patient_seconds > 0
            faults = draw_faults(count, seed, kinds, first.record, sizes, torchrun=torchrun, long_hangs=long_hangs)
            for number, fault in enumerate(faults, 1):
                yield self._hurt(number, fault)

    def _attempt(self, name: str, output_dir: Path, number: int, fault: Fault | None, limit: float) -> Attempt:
        place = self._out / "logs" / f"{name}-{number}"
        place.parent.mkdir(parents=True, exist_ok=True)
        order = Order(str(place.with_name(f"{place.name}.record")), fault)
        restarts = 0 if fault is not None and fault.kind == "flip" else _RESTARTS  # a bit is flipped before it goes on
        command = self._job.command(output_dir, () if fault is None else fault.options, restarts)
        return run_attempt(command, order, place, limit)

    def _hurt(self, number: int, fault: Fault) -> Result:
        name = f"fault-{number}"
        output_dir, limit = self._out / name, _LEAST_SECONDS + _TIMES_LONGER * self.reference_seconds
        limit += self._job.patient_seconds
        planned = [replace(fault, kind="flip"), replace(fault, at=0)] if fault.kind == "late-flip" else [fault]
        attempts: list[Attempt] = []
        complete = 0  # checkpoints: a flip leaves one of them good
        while not attempts or (attempts[-1].code != 0 and len(attempts) < _MOST_ATTEMPTS):
            index = len(attempts)
            told = planned[index] if index < len(planned) and (index == 0 or complete > 1) else None
            attempts.append(self._attempt(name, output_dir, index + 1, told, limit))
            complete = sum(entry.complete for entry in list_checkpoints(output_dir))
            if index == 0 and fault.kind == "flip" and complete > 1:
                self._flip(output_dir, fault)
        outcome = None
        if attempts[-1].code == 0:
            outcome = compare(
                output_dir,
                self._out / "reference",
                may_miss_evaluation=fault.kind == "preempt",
                tolerance=_OTHER_LAYOUT if fault.kind == ELASTIC else None,
            )
        left = [each for attempt in attempts for each in attempt.left]
        left += [f"{output_dir.name}/{each}" for each in sorted(leftovers.unfinished(output_dir))]
        named = _named(output_dir) if fault.kind == "slow" else None
        result = _result(number, fault, attempts, len(planned) - 1, outcome, left, named)
        if result.good:
            shutil.rmtree(output_dir)
        return result

    def _flip(self, output_dir: Path, fault: Fault) -> None:
        newest = [entry.path for entry in list_checkpoints(output_dir) if entry.complete][-1]
        flip_bit(newest, fault.position)


def _result(
    number: int,
    fault: Fault,
    attempts: list[Attempt],
    hurt: int,
    outcome: Outcome | None,
    left: list[str],
    named: tuple[str, float] | None = None,
) -> Result:
    """Put together what the attempts showed.

    Args:
        hurt: the index of the attempt in which the fault struck.
        named: the rank that the run named as slow, and how many times.
    """
    strike = attempts[hurt].record.strike if hurt < len(attempts) else None
    if strike is None:
        return Result(number, fault, None, "", None, "", None, "not reached", None, len(attempts), outcome, tuple(left))
    attempt = attempts[hurt]
    found = next((line for each in attempts if (line := each.first_line(KINDS[fault.kind].notice, strike.at))), None)
    slower = attempt.record.slower() if fault.kind == "slow" else None
    again = next((at for each in attempts[hurt + 1 :] if (at := each.record.first_step()) is not None), None)
    if (restarted := attempt.record.restarted(strike.at)) is not None:
        again = attempt.record.first_step(restarted) or again
    return Result(
        number=number,
        fault=fault,
        where=f"{_LOADED.sub('', strike.phase)}, {strike.where}",
        noticed_by="" if found is None else _speaker(found.text),
        noticed_seconds=None if found is None else found.at - strike.at,
        notice="" if found is None else found.text,
        ended_seconds=attempt.ended_at - strike.at if attempt.code != 0 else None,
        recovered=_recovered(attempts, hurt, strike)
        + (f"; {named[0]} named, {named[1]:.1f} of {fault.times:g} times" if named else "")
        + (f"; {slower:.1f} times measured" if slower else ""),
        again_seconds=None if again is None else again - strike.at,
        attempts=len(attempts),
        outcome=outcome,
        left=tuple(left),
        named_factor=named[1] if named else None,
        measured_factor=slower,
    )


def _named(output_dir: Path) -> tuple[str, float] | None:
    """The rank whose forwards most rows of a run's metrics name as slow, and their median factor; None: none."""
    rows = [row_of(line) or {} for line in (output_dir / "metrics.jsonl").read_bytes().splitlines()]
    found = defaultdict[tuple[int, int], list[float]](list)
    for each in (each for row in rows for each in row.get("stragglers", ()) if each["kind"] == "forwards"):
        found[each["replica"], each["rank"]].append(each["factor"])
    if not found:
        return None
    (replica, rank), factors = max(found.items(), key=lambda item: len(item[1]))
    return f"rank {rank}{f' of replica {replica}' if replica else ''}", statistics.median(factors)


def _speaker(line: str) -> str:
    """Who printed a line."""
    if (found := _SPOKEN_BY.search(line)) is not None:
        return f"rank {found[1]}"
    if line.startswith("pipeloom: no progress: "):
        return "watchdog"
    if line.startswith("pipeloom: "):
        return "launcher"
    return "rank 0" if line.startswith("step ") or "passed over" in line else "torchrun"


def _recovered(attempts: list[Attempt], hurt: int, strike: Strike) -> str:
    last = attempts[-1]
    if last.code != 0:
        return f"no: exit code {last.code} of attempt {len(attempts)}"
    since = 0.0
    if len(attempts) == hurt + 1:
        in_place = next((match for line in last.lines if (match := _IN_PLACE.search(line.text))), None)
        if in_place is not None:
            return in_place[1]
        fewer = next((match for line in last.lines if (match := _FEWER.search(line.text))), None)
        if fewer is not None:
            return f"{fewer[1]}, {fewer[2]}"
        restarted = last.record.restarted(strike.at)
        if restarted is None:
            return "went on"
        since = restarted
    lines = [line.text for line in last.lines if line.at > since]
    found = next((match for line in lines if (match := _RESUMED.search(line))), None)
    begun = max(attempt.record.begun_steps(strike.at) for attempt in attempts[: hurt + 1])
    start = int(found[1]) if found else 0
    words = ("restarted by torchrun" if since else "resumed") + (f" from checkpoint-{start}" if found else " at step 0")
    passed = any("passed over" in line for line in lines)
    again = f", {counted(max(0, begun - start), 'step')} again" if begun else ""
    return words + (" before the damaged one" if passed else "") + again
