"""`StepAgreement`: after a loss, the surviving ranks are all before the update of a step, or all behind it.

One sum over all processes precedes the update. Where a rank dies during the sum, others may have its result or not:

    rank 0    sum ──▶ notes the result ──▶ update     │ next step: PeerLost
    rank 1    sum ──▶ PeerLost ──▶ closes its connections, waits for the others ──▶ finds the note ──▶ update
    rank 2    sum ✗

Whoever has the result has noted it before its update, in memory that outlives it. No rank has updated if there is no
note once all others have stopped or ended.

A rank also notes the states of its random generators before that sum. They are all that a data-parallel replica does
not know of this rank.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.common.process_place import stat_fields
from pipeloom.errors import PeerLost
from pipeloom.processes.recovery.notes import Notes
from pipeloom.train.checkpoint.state import RandomState, random_state

_RANDOM, _RESULT, _RUNS, _STOPPED, _WHOLE, _ROW = (0, 1), 2, 3, 4, 5, 6  # parts of the notes
_MOST_RUNS = 16  # of one step, which runs again where it is not finite
_POLL_SECONDS = 0.005
_STOP_SECONDS = 20.0  # until the other ranks have stopped


class StepAgreement:
    """What one process notes in the steps of a run, for the recovery from the loss of a rank.

    Args:
        notes: of all ranks.
        rank: of this process.
        cut: closes the connections to other processes, so that none of them waits for this one.

    Attributes:
        complete: the last step of which this process has the whole result.
        updating: whether the next step changes the state, which may be before, in or behind the update.
    """

    def __init__(self, notes: Sequence[Notes], rank: int, cut: Callable[[], None]) -> None:
        self._own, self._cut = notes[rank], cut
        self._others = [each for other, each in enumerate(notes) if other != rank]
        self._run = 0
        self._row: Mapping[str, Any] = {}
        self.complete, self.updating = 0, False

    def begin(self, step: int, *, whole: bool) -> None:
        """This process goes on after `step`; notes of earlier steps do not count.

        Args:
            step: the last one that is complete.
            whole: whether data-parallel replicas have the same state, but for random generators.
        """
        for part in (*_RANDOM, _RESULT, _STOPPED, _WHOLE, _ROW):
            self._own.clear(part)
        if whole:
            self._own.write(_WHOLE, 0)
        self._own.write(_RUNS, os.getpid())
        self._note_random(step)
        self.complete, self._row, self._run, self.updating = step, {}, 0, False

    def forget(self) -> None:
        """Until `begin`, neither copies of this state count nor those of replicas for this rank."""
        for part in (*_RANDOM, _WHOLE):
            self._own.clear(part)

    def begin_update(self) -> None:
        """From now until `finish`, the next step changes the state. Until then it may have run more than once."""
        self.updating = True

    def finish(self, step: int, row: Mapping[str, Any]) -> None:
        """A step is complete, its metrics are written."""
        self.complete, self._row, self._run, self.updating = step, row, 0, False

    def keep_row(self) -> None:
        """Note the metrics of the last complete step, which process 0 may have lost."""
        if self._row:
            self._own.write(_ROW, self.complete, json.dumps(dict(self._row)).encode())

    @property
    def row(self) -> dict[str, Any]:
        """What `keep_row` noted; empty: nothing."""
        key = self._own.key(_ROW)
        found = None if key is None else self._own.read(_ROW, key)
        return {} if found is None else json.loads(found)

    @property
    def whole(self) -> bool:
        """Whether replicas may take copies of this process's state."""
        return self._own.key(_WHOLE) is not None

    def stop(self) -> None:
        """This process has left its steps."""
        self._own.write(_STOPPED, 0)

    def sum(self, values: Tensor, sum_over_processes: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum over processes before the update of the step after `complete`.

        Raises:
            PeerLost: a process was lost, and none has the sum.
        """
        key = (self.complete + 1) * _MOST_RUNS + self._run
        self._run += 1
        self._note_random(self.complete + 1)
        try:
            summed = sum_over_processes(values)
        except PeerLost:
            self._cut()
            self.stop()  # whatever it goes on with, another process has noted
            if (found := self._found(key)) is None:
                raise
            summed = torch.frombuffer(bytearray(found), dtype=values.dtype)
        self._own.write(_RESULT, key, summed.numpy().tobytes())
        return summed

    @property
    def random_steps(self) -> list[int]:
        """The steps after which the generator states of this process's rank are noted."""
        return sorted(key for part in _RANDOM if (key := self._own.key(part)) is not None)

    def random(self, step: int) -> RandomState | None:
        """The noted states of the random generators after a step."""
        data = self._own.read(_RANDOM[step % 2], step)
        if data is None:
            return None
        found = json.loads(data)
        tensors = {
            name: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
            for name, text in found["tensors"].items()
        }
        return RandomState(tensors, found["values"])

    def _note_random(self, step: int) -> None:
        state = random_state()
        tensors = {name: tensor.numpy().tobytes().hex() for name, tensor in state.tensors.items()}
        text = json.dumps({"tensors": tensors, "values": state.values})
        self._own.write(_RANDOM[step % 2], step, text.encode())

    def _found(self, key: int) -> bytes | None:
        """The sum that another process has noted, once all have stopped or ended; None: none has it."""
        deadline = time.monotonic() + _STOP_SECONDS
        while True:
            late = [each for each in self._others if each.key(_STOPPED) is None and not _has_ended(each.key(_RUNS))]
            found = [data for each in self._others if (data := each.read(_RESULT, key)) is not None]
            if found or not late or time.monotonic() > deadline:
                return found[0] if found else None
            time.sleep(_POLL_SECONDS)


def _has_ended(process: int | None) -> bool:
    fields = stat_fields(process) if process is not None else None
    return not fields or fields[0] in "ZX"
