"""`PairStreams`: the F and the B of an overlapped pair in two streams of a device.

    host       RECV_F RECV_B   B F     SEND_F SEND_B   W          F of stage 3; B and W of stage 0
    first          ──wait── B ────────────────╲ mark ─ W ─
    second     ──wait── F ────────╲ mark ─────────────────

The first, third, ... stage of a rank has the stream in which the rank computes, the others the second stream. All
actions of a stage are in its stream, since autograd runs a backward in the stream of its forward. Between two actions
of different streams there is a mark: they run one after the other, as in one stream, and memory that one of them has
freed is not used again too early. Only the two sides of a pair have none. While one of them waits for other processes,
for example for the exchanges of its experts, the other one computes.

The host starts the backward first: without recomputation it knows the sizes of all that it exchanges. A forward with
experts reads on the host how many rows each of them gets, and until they are known the host would start nothing else.

What several stages of a rank share could be freed in one stream and used in the other. So pairs run in turn with tied
parameters, and where replicas gather or reduce inside a step (`pipeloom.training.construction`).
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from operator import itemgetter

from pipeloom.devices import Device, Mark
from pipeloom.devices.device import Stream
from pipeloom.engine.rank_state import Record
from pipeloom.ir import Action, Program
from pipeloom.ir.action import COMPUTE_OPS
from pipeloom.passes.blocks import blocks_of


def stages_of_second_stream(program: Program, rank: int) -> frozenset[int]:
    """The stages of a rank whose actions run in the second stream; none if the rank has no overlapped pairs."""
    partners = program.schedule.partners
    if not any(action in partners for action in program.orders[rank]):
        return frozenset()
    return frozenset(sorted(program.placement.stages_of[rank])[1::2])


def backward_first(program: Program, rank: int) -> list[Action]:
    """The order of a rank as the host starts it: of each pair the backward before the forward."""
    order = list(program.orders[rank])
    for position, action in enumerate(order[:-1]):
        if program.schedule.partners.get(action) == order[position + 1]:
            order[position : position + 2] = order[position + 1], action
    return order


def in_turn(records: Iterable[Record], partners: Mapping[Action, Action]) -> list[Record]:
    """The records of a run as if pairs did not overlap: the time of each is divided in proportion to its sides' own.

    Costs, timelines and bubbles count every second of a rank once.
    """
    rows = list(records)
    sides = {action: (start, end) for action, start, end in rows if action.op in COMPUTE_OPS}
    for first, second in partners.items():
        if first in sides:
            (one, one_end), (other, other_end) = sides[first], sides[second]
            start, end, both = min(one, other), max(one_end, other_end), one_end - one + other_end - other
            middle = start + (end - start) * ((one_end - one) / both if both else 0.5)
            sides[first], sides[second] = (start, middle), (middle, end)
    return sorted(((action, *sides.get(action, times)) for action, *times in rows), key=itemgetter(1, 2))


def _pairs(program: Program, rank: int) -> dict[Action, int]:
    """The number of the overlapped pair to which an action of a rank belongs, messages included."""
    order = program.orders[rank]
    blocks = (block for block in blocks_of(order, program) if len(block.computations) > 1)
    return {action: n for n, block in enumerate(blocks) for action in order[block.first : block.last + 1]}


def _waits(is_second: Sequence[bool], pairs: Sequence[int | None]) -> list[int | None]:
    """For each step, the last step of the other stream that it has to wait for; None if its stream waits already."""
    found: list[int | None] = []
    last: dict[bool, int | None] = {False: None, True: None}  # by stream
    before_pair, waited, pair = dict(last), dict(last), None
    for position, (stream, own) in enumerate(zip(is_second, pairs, strict=True)):
        if own is not None and own != pair:
            before_pair = dict(last)
        pair = own
        other = (last if own is None else before_pair)[not stream]
        found.append(None if other == waited[stream] else other)
        waited[stream], last[stream] = other, position
    return found


class PairStreams:
    """Which stream each action of a rank is in, and what it waits for.

    Args:
        device: where the rank computes.
        program, rank: a program, in which this rank has overlapped pairs.
        actions: those that the rank starts, in this order, each as often as it has steps.
        second: the stages of the second stream.

    Attributes:
        partners: of each F that starts a pair of the program, the backward.
    """

    def __init__(
        self, device: Device, program: Program, rank: int, actions: Sequence[Action], second: frozenset[int]
    ) -> None:
        self._device, self.partners = device, program.schedule.partners
        self._second, pairs = [action.stage in second for action in actions], _pairs(program, rank)
        self._waits = _waits(self._second, [pairs.get(action) for action in actions])
        self._marked = {*self._waits}
        self._marks: dict[int, Mark] = {}

    @contextmanager
    def running(self) -> Generator[None]:
        """Around a run, or a part of one: the second stream comes after all that is before it in the first one, and
        the first one after all of the second one, also where the run fails."""
        self._marks.clear()
        began = self._device.mark()
        with self._device.on(Stream.SECOND):
            self._device.wait(began)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # of a device that failed: the first error says more
                self._join()
            raise
        self._join()

    def _join(self) -> None:
        with self._device.on(Stream.SECOND):
            done = self._device.mark()
        self._device.wait(done)

    @contextmanager
    def at(self, position: int) -> Generator[None]:
        """Around the step at a position: what it starts goes to the stream of its stage."""
        device = self._device
        with device.on(Stream.SECOND) if self._second[position] else nullcontext():
            wait = self._waits[position]
            if wait in self._marks:  # else it was in an earlier part of the run
                device.wait(self._marks[wait])
            yield
            if position in self._marked:
                self._marks[position] = device.mark()
