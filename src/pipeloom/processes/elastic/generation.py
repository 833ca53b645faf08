"""`Generation`: the ranks of an elastic run from one start of all of them to the next. No torch."""

import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from pipeloom.common.quantities import counted
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.elastic.copy_head import BEGUN, FIRST, common_step, read_number, write_number
from pipeloom.processes.preemption import GROW, PREEMPTED, Request
from pipeloom.processes.recovery.lifeline import PEER_LOST
from pipeloom.processes.recovery.recoveries import Rerouting, Tether, Tethers

_LEAVES = 1 << 30  # in place of the number of a meeting: there will be none
_READY_SECONDS = 30.0  # from a loss until a surviving rank has copied its state
_POLL_SECONDS = 0.02
_BESIDE = (0, PEER_LOST, PREEMPTED)  # exit codes of ranks that have not failed by themselves


class _Process(Protocol):
    def poll(self) -> int | None: ...


class Rank(Protocol):
    """A rank as the launcher knows it."""

    @property
    def process(self) -> _Process: ...
    @property
    def black_box(self) -> BlackBox: ...


class End(NamedTuple):
    """How a generation has ended.

    Attributes:
        lost: the ranks that were lost.
        text: which of them failed first, how and where.
        begun: the last step that these ranks had begun; 0: none.
        grows: whether the ranks have saved, so that more of them go on.
    """

    lost: tuple[int, ...]
    text: str
    begun: int
    grows: bool


class Generation:
    """Ranks on slots.

    Args:
        slots: the local rank of each.
        num_more: how many ranks more the run could have, if lost slots were free again.
        grow_seconds: after which a run with fewer ranks grows by itself; None: when the launcher gets `GROW`.
        grown: whether a generation with fewer slots was before this one.
        before: of the previous generation, held until all ranks of this one have a copy or have made a step.
        variables: what the ranks read in their environment about `before`.
        first: the step + 1 after which the run began; 0: it has not.
        lends: whether surviving ranks may have newer states than the copies, which they copy after a loss.
        survives: whether the run can go on without a number of these slots.
        copied: called once `before` is no longer held.
        reroute: how the ranks go on in their processes without some of them; None: they do not.

    Attributes:
        tethers: of the ranks; the launcher starts and watches them with these.
        end: None unless the run goes on with other ranks.
    """

    def __init__(
        self,
        slots: Sequence[int],
        *,
        num_more: int,
        grow_seconds: float | None,
        grown: bool,
        before: Sequence[Tether],
        variables: Mapping[str, str],
        first: int,
        lends: bool,
        survives: Callable[[int], bool],
        copied: Callable[[], None],
        reroute: Callable[[Collection[int]], Rerouting | None],
    ) -> None:
        self.slots, self._num_more, self._grown = tuple(slots), num_more, grown
        self.tethers = Tethers(len(slots))
        self._before, self._variables = tuple(before), variables
        self._lends, self._survives, self._copied, self._reroute = lends, survives, copied, reroute
        write_number(self.tethers.by_rank[0].memories.copies[0], FIRST, first)
        self._grow_seconds = grow_seconds
        self._grow_at = self._time_to_grow() if num_more else None
        self._asked = self._grows = False
        self.end: End | None = None

    @property
    def inherited(self) -> list[int]:
        """Descriptors that the ranks inherit: the copies of the previous generation."""
        return [memory for tether in self._before for memory in tether.memories.copies]

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the ranks, as long as the copies of the previous generation are held."""
        return self._variables if self._before else {}

    @property
    def first(self) -> int:
        """The step + 1 after which the run began; 0: it has not."""
        return read_number(self.tethers.by_rank[0].memories.copies[0], FIRST)

    def _time_to_grow(self) -> float | None:
        return None if self._grow_seconds is None else time.monotonic() + self._grow_seconds

    def goes_on_without(self, lost: Collection[int]) -> Rerouting | None:
        """How the ranks go on in their processes without some of them, which no longer count; None: they do not."""
        if self._grows or self._before:  # ranks save and end, or have no copies of their own yet
            return None
        found = self._reroute(lost)
        if found is not None:
            self.slots = tuple(self.slots[rank] for rank in found.order)
            self._num_more += len(lost)
            self._grow_at = self._time_to_grow()
        return found

    def wants_to_grow(self, request: Request, ranks: Sequence[Rank]) -> bool:
        """Whether the ranks are to save and to end now, so that more of them go on; called again and again.

        Args:
            request: with the signals that the launcher has received; `GROW` is taken out.
            ranks: those that run.
        """
        while GROW in request.signals:
            request.signals.remove(GROW)
            self._asked = True
            if not self._num_more:
                sys.stderr.write(f"pipeloom: {GROW.name}: the run has {counted(len(self.slots), 'rank')}, all it may\n")
                sys.stderr.flush()
        trains = all(each.black_box.steps for each in ranks)
        if self._before and (trains or common_step(each.memories.copies for each in self.tethers.by_rank) >= 0):
            self._before = ()
            self._copied()
        due = self._asked or (self._grow_at is not None and time.monotonic() >= self._grow_at)
        if not due or not trains or self._grows or not self._num_more or request.received:
            return False
        self._grows = True
        for rank in ranks:
            rank.black_box.grows = 1.0
        return True

    def note(self, ranks: Sequence[Rank], codes: Sequence[int | None], text: str, request: Request) -> None:
        """The ranks have ended or are about to: decide whether the run goes on.

        Args:
            ranks: of this generation.
            codes: exit codes; None for ranks that still run.
            text: which rank failed first, how and where.
            request: of signals to the launcher. After a loss, ranks start that save for it.
        """
        if request.ending((), begun=True) is not None:
            return
        if self._grows and PREEMPTED in codes and all(code in (0, PREEMPTED) for code in codes):
            self.end = None if request.received else End((), text, 0, True)
            return
        begun = max(read_number(tether.memories.copies[0], BEGUN) for tether in self.tethers.by_rank)
        starts = not all(each.black_box.steps for each in ranks)  # an error of a slot that is not usable again
        lost = tuple(
            rank
            for rank, code in enumerate(codes)
            if code is not None and (code < 0 or (self._grown and starts and code not in _BESIDE))
        )
        others = [code for rank, code in enumerate(codes) if rank not in lost]
        met = all(each.black_box.phase for each in ranks)
        if not lost or not (met or self.first) or any(code not in (None, *_BESIDE) for code in others):
            return
        if self._survives(len(lost)):
            self.end = End(lost, text, begun, False)
            if self._lends and met:  # else no rank has made a step
                self._wait_for_copies(ranks, codes, request)

    def _wait_for_copies(self, ranks: Sequence[Rank], codes: Sequence[int | None], request: Request) -> None:
        """Tell the surviving ranks of the loss, and wait until they have copied their state and left the run."""
        waits = [rank for rank, code in enumerate(codes) if code is None]
        for rank in waits:
            self.tethers.by_rank[rank].send({"generation": _LEAVES})
        deadline = time.monotonic() + _READY_SECONDS
        while waits and request.ending((), begun=True) is None and time.monotonic() < deadline:
            waits = [
                rank for rank in waits if ranks[rank].black_box.ready != _LEAVES and ranks[rank].process.poll() is None
            ]
            time.sleep(_POLL_SECONDS)
