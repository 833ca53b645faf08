"""`Driver`: runs the ranks of one process to their ends, call after call, until the first error."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress

from pipeloom.engine.rank_threads import RankThreads
from pipeloom.errors import InputError, RunError
from pipeloom.transport.interface import Transport

Run = Generator[
    None
]  # what one rank does in a call; it yields whenever it has to wait and the transport does not block


class Driver:
    """All ranks of a process, by one thread or a thread each.

    Args:
        rank: of this process; None where it holds all ranks.
        num_ranks: of the pipeline.
        transport: of the pipeline; closed after an error.
        leave: called after an error, for copies of the pipeline that may wait for this one.

    Attributes:
        num_calls: so far, all ranks counting alike.
        ended: why nothing can run any more.
    """

    def __init__(self, rank: int | None, num_ranks: int, transport: Transport, leave: Callable[[], None]) -> None:
        self._transport, self._leave = transport, leave
        in_threads = rank is None and transport.blocking and num_ranks > 1
        self._threads = RankThreads(num_ranks, transport) if in_threads else None  # type: ignore[arg-type]
        self._running = False
        self.num_calls = 0
        self.ended: str | None = None

    def check_free(self) -> None:
        """Raises RunError after the end, InputError in the middle of a call."""
        if self.ended is not None:
            raise RunError(f"this Pipeline cannot run any more ({self.ended}); make a new one")
        if self._running:
            raise InputError(
                "a Pipeline was called by a stage or a loss of its own: it does one thing at a time; call it before "
                "or after"
            )

    def run(self, runs: dict[int, Run], finish: Callable[[], None]) -> None:
        """Run every rank to its end, then `finish`; after an error inside either, nothing runs any more."""
        self._running = True
        with self.ended_by_errors(runs.values()):
            if self._threads is not None:
                self._threads.run(runs)
            else:
                _take_turns(list(runs.values()))
            finish()
            self._transport.end_step()

    @contextmanager
    def ended_by_errors(self, runs: Iterable[Run] = ()) -> Generator[None]:
        """After an error inside the block the ranks are out of step: the pipeline closes."""
        try:
            yield
        except BaseException as error:
            self.ended = f"it failed: {type(error).__name__}: {error}"
            for run in runs:  # the ranks that were waiting let go of what they hold
                with suppress(Exception):  # what one of them says to that would hide the error
                    run.close()
            self.close()
            self._leave()
            raise
        finally:
            self._running = False

    def close(self) -> None:
        """Close the channels. Closing twice does nothing."""
        self.ended = self.ended or "it was closed"
        if self._threads is not None:
            self._threads.close()
        self._transport.close()


def _take_turns(runs: list[Run]) -> None:
    """One thread drives all runs: each goes on until it has to wait for another."""
    while runs:
        runs = [run for run in runs if next(run, runs) is not runs]
