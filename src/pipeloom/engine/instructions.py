"""`InstructionList`: the loop that runs the program of one rank; a stream runs it block by block."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from pipeloom.devices import Device, Stamp
from pipeloom.engine.calls.refusals import PeerRefused
from pipeloom.engine.pair_streams import PairStreams, in_turn
from pipeloom.engine.rank_state import Record, Step
from pipeloom.errors import CallerError, PeerLost, PipeloomError, RunError, StageError, one_line, unwrapped
from pipeloom.ir import Action, Op
from pipeloom.processes.black_box import BLACKBOX_BYTES, LABEL_BYTES, label_of

# What one rank does in a call. It yields whenever it has to wait and the transport does not block.
Run = Generator[None]


@dataclass(frozen=True, slots=True)
class Instruction:
    """One `Step` of an action.

    Attributes:
        action: what the step belongs to; an action may have several steps.
        run: runs the step.
        ready: asked before `run` until it returns True, where one thread drives several ranks; None: never asked.
        label: of the action, for the black box.
    """

    action: Action
    run: Callable[[], None]
    ready: Callable[[], bool] | None
    label: bytes


class InstructionList:
    """Instructions of one rank in order, and the times of their last run.

    Args:
        device: where the rank computes: it says when an action began and ended, which may be after its call returned.
        blocking: whether steps may block; else they are asked whether they are ready.
        blackbox: a buffer for the label of the running action and its start; None: without labels.
        streams: makes the `PairStreams` of these actions, one per step; None: all are in the current stream.
    """

    def __init__(
        self,
        rank: int,
        steps: Iterable[tuple[Action, Step]],
        *,
        device: Device,
        blocking: bool,
        blackbox: Any,
        streams: Callable[[Sequence[Action]], PairStreams] | None = None,
    ) -> None:
        self._instructions = tuple(
            Instruction(action, run, None if blocking else ready, label_of(action)) for action, (run, ready) in steps
        )
        self._rank, self._device, self._blackbox = rank, device, blackbox
        self._clock = None if blackbox is None else memoryview(blackbox)[LABEL_BYTES:BLACKBOX_BYTES].cast("B").cast("d")
        self._starts: list[Stamp] = [0.0] * len(self._instructions)
        self._ends: list[Stamp] = [0.0] * len(self._instructions)
        self._streams = None if streams is None else streams([each.action for each in self._instructions])

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self._instructions)

    def run(self, start: int = 0, stop: int | None = None) -> Run:
        """Run the instructions from `start` to before `stop`; yields whenever one is not ready.

        Raises:
            StageError: a step raised.
            PeerLost: a rank it waited for went away.
            PeerRefused: the batch of another rank is invalid.
        """
        starts, ends, blackbox, clock = self._starts, self._ends, self._blackbox, self._clock
        stamp, streams = self._device.stamp, self._streams
        position = start
        try:
            with nullcontext() if streams is None else streams.running():
                for position, instruction in enumerate(self._instructions[start:stop], start):
                    if instruction.ready is not None:
                        while not instruction.ready():
                            yield
                    if clock is not None:
                        blackbox[:LABEL_BYTES] = instruction.label
                        clock[0] = perf_counter()
                    if streams is None:  # not one context for both: this loop runs for every action
                        starts[position] = stamp()
                        instruction.run()
                        ends[position] = stamp()
                        continue
                    with streams.at(position):
                        starts[position] = stamp()
                        instruction.run()
                        ends[position] = stamp()
        except (CallerError, PeerRefused):
            raise
        except Exception as error:
            raise explained(error, self._rank, self._instructions[position].action) from error

    def records(self) -> Iterable[Record]:
        """Every instruction with its last start and end; 0.0 where it has not run yet. Overlapped pairs in turn."""
        actions = (instruction.action for instruction in self._instructions)
        times = self._device.seconds([*self._starts, *self._ends])
        found = zip(actions, times[: len(self._starts)], times[len(self._starts) :], strict=True)
        return found if self._streams is None else in_turn(found, self._streams.partners)


def explained(error: Exception, rank: int, action: Action) -> PipeloomError:
    """`error` with the rank, stage, action and micro-batch in which it was raised."""
    where = f"rank {rank}, stage {action.stage}, action {action}"
    if action.microbatch is not None:
        where += f", {'update' if action.op is Op.STEP else 'micro-batch'} {action.microbatch}"
    if isinstance(error, RunError):
        kind = PeerLost if isinstance(error, PeerLost) else RunError
        return kind(f"{where}: {unwrapped(str(error))}")
    return StageError(f"{where}: {one_line(error)}")
