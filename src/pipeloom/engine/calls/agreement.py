"""`BatchAgreement`: what all ranks know about a batch before they run it.

LineExchange      the ranks of one replica, over the channels of the pipeline, where a rank in another call notices
MembersExchange   all processes, one all-gather
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from pipeloom.engine.batch import Batch
from pipeloom.engine.calls.equal_seeds import different_states
from pipeloom.engine.calls.refusals import refused_by
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.processes.members import Members
from pipeloom.transport.call_numbers import call_count, call_only, out_of_step
from pipeloom.transport.interface import Channel, Lane, Transport, program_channels
from pipeloom.transport.values import flatten, unflatten

_LOST = "another rank ended before all ranks had read their batches; see its error"
_REFUSED = -1


class Agreed(NamedTuple):
    """What all processes know about the batches of a call.

    Attributes:
        fewest, most: samples in the smallest and the largest batch of a replica.
        all_samples: of all replicas.
        labels: what is counted in the labels of all replicas, as the ranks with the stages of this one know them; see
            `pipeloom.engine.batch.LabelWeights`.
        elements: of the last batches of all replicas, see there.
    """

    fewest: int
    most: int
    all_samples: int
    labels: tuple[int, int] = (0, 0)
    elements: tuple[int, int] = (0, 0)


class RankCall(NamedTuple):
    """A call, as one rank makes it.

    Attributes:
        number: of the call.
        settings: its arguments, which all ranks have to pass alike.
        drawing: the state of torch's generator where ranks compare it, see `drawing_state`; 0: this rank does not.
    """

    number: int
    settings: str = ""
    drawing: int = 0


class _Row(NamedTuple):
    """What one rank tells the others before a call; forms and settings as checksums."""

    samples: int
    labels: int
    counting: int
    elements: int
    weight: int
    inputs: int
    targets: int
    settings: int
    drawing: int


class Exchange(ABC):
    """Exchanges numbers about each rank's batch.

    Attributes:
        rank: of this process among those that exchange.
    """

    rank: int

    @abstractmethod
    def exchange(self, counts: Sequence[int], text: str, call: int) -> tuple[list[list[int]], str]:
        """The counts of all ranks, and the first text that is not empty; every rank calls it.

        Args:
            counts: of this rank; the first is the number of its samples. -1: it refuses its batch.
            text: why.
            call: number of the call.

        Raises:
            RunError: ranks make different calls. PeerLost: a rank ended or timed out.
        """

    @abstractmethod
    def gather(self, text: str, call: int) -> list[str]:
        """The texts of all ranks; every rank calls it."""


class LineExchange(Exchange):
    """The ranks of one replica tell their neighbours, round by round, what they know.

    Args:
        rank: of this process in the pipeline.
        program: its messages have the channels.
        transport: with `channels` open.

    Attributes:
        channels: of all ranks.
    """

    def __init__(self, rank: int, program: Program, transport: Transport) -> None:
        self.rank, self._transport, self._size = rank, transport, program.num_ranks
        pairs = {(c.source, c.target) for c in program_channels(program) if c.lane is Lane.PIPELINE}
        pairs |= {(target, source) for source, target in pairs}
        self.channels = {Channel(source, target, Lane.PIPELINE) for source, target in pairs}
        self._peers = sorted(target for source, target in pairs if source == rank)
        self._rounds = max(map(len, (_rounds_from(first, pairs) for first in range(self._size))))
        self.last_refused = 0

    def exchange(self, counts: Sequence[int], text: str, call: int) -> tuple[list[list[int]], str]:
        known = self._gather(list(counts), text, call)
        texts = [text for _, text in known.values() if text]
        return [known[rank][0] for rank in range(self._size)], texts[0] if texts else ""

    def gather(self, text: str, call: int) -> list[str]:
        known = self._gather([], text, call)
        return [known[rank][1] for rank in range(self._size)]

    def _gather(self, counts: list[int], text: str, call: int) -> dict[int, tuple[list[int], str]]:
        known = {self.rank: (counts, text)}
        for _ in range(self._rounds):
            message = flatten({rank: known[rank] for rank in sorted(known)})
            for peer in self._peers:
                self._transport.outgoing(Channel(self.rank, peer, Lane.PIPELINE)).send(*message, call)
            for peer in self._peers:
                known |= self._receive(peer, call)
        return known

    def _receive(self, peer: int, call: int) -> dict[int, tuple[list[int], str]]:
        end = self._transport.incoming(Channel(peer, self.rank, Lane.PIPELINE))
        while True:
            message = end.receive()
            if message.call == call:
                found: dict[int, tuple[list[int], str]] = unflatten(message.layout, message.tensors)
                return found
            if call_count(message.call) > self.last_refused:
                raise out_of_step(peer, call_only(message.call), call)


def _rounds_from(first: int, pairs: set[tuple[int, int]]) -> list[set[int]]:
    """The ranks at each distance from a rank, 1 and more."""
    seen, rounds = {first}, [{first}]
    while rounds[-1]:
        rounds.append({target for source, target in pairs if source in rounds[-1]} - seen)
        seen |= rounds[-1]
    return rounds[1:-1]


class MembersExchange(Exchange):
    """All processes of all replicas."""

    def __init__(self, members: Members, timeout_seconds: float) -> None:
        self.rank, self._members, self._timeout = members.rank, members, timeout_seconds

    def exchange(self, counts: Sequence[int], text: str, call: int) -> tuple[list[list[int]], str]:
        rows = self._members.gather_numbers([call, *counts], self._timeout)
        other = next((rank for rank, row in enumerate(rows) if row[0] != call), None)
        if other is not None:
            raise out_of_step(other, rows[other][0], call)
        found = [row[1:] for row in rows]
        if all(samples != _REFUSED for samples, *_ in found):
            return found, ""
        return found, next(filter(None, self.gather(text, call)))

    def gather(self, text: str, call: int) -> list[str]:
        texts = self._members.gather(text.encode(), lost=_LOST, timeout_seconds=self._timeout)
        return [each.decode() for each in texts]


class BatchAgreement:
    """Exchanges the sizes of batches between ranks before a call.

    Args:
        exchange: between these ranks.
        replicas: of the pipeline, as the ranks that exchange.
        replica_ranks: the ranks with the same stages as this one in all replicas; empty: there is one.
        batches: groups of ranks that read the same batch.
        lines: groups of ranks that share layers, which draw alike.
    """

    def __init__(
        self,
        exchange: Exchange,
        replicas: Sequence[Sequence[int]],
        replica_ranks: Sequence[int],
        batches: Sequence[Sequence[int]],
        lines: Sequence[Sequence[int]] = (),
    ) -> None:
        self._exchange, self._replicas, self._alike = exchange, replicas, replica_ranks
        self._batches, self._lines = batches, lines
        counted = {*(replica_ranks or [exchange.rank])}
        self._counted = [line for line in replicas if counted & {*line}]

    def agree(
        self,
        batch: Batch,
        labels: tuple[int, int],
        refusal: Exception | None,
        call: RankCall,
        elements: tuple[int, int] = (0, 0),
    ) -> Agreed:
        """Exchange the size and the form of a batch; every rank calls it.

        Args:
            batch: what this process reads.
            labels: what is counted in its labels.
            refusal: why it cannot use its batch.
            call: this process's.
            elements: of its last batch.

        Raises:
            InputError: a rank cannot use its batch, those of one replica have different sizes or forms, ranks have
                different settings, or ranks that share layers draw different random numbers; on all ranks.
            RunError: ranks make different calls. PeerLost: a rank ended or timed out.
        """
        text = "" if refusal is None else refused_by(self._exchange.rank, refusal)
        samples = batch.num_samples if refusal is None else _REFUSED
        inputs, targets, settings = (crc32(each.encode()) for each in (*batch.forms, call.settings))
        own = _Row(samples, *labels, *elements, inputs, targets, settings, call.drawing)
        found, text = self._exchange.exchange(own, text, call.number)
        rows = [_Row(*row) for row in found]
        if any(row.samples == _REFUSED for row in rows):
            raise refusal or InputError(text)
        other = next((rank for rank, row in enumerate(rows) if row.settings != rows[0].settings), None)
        if other is not None:
            raise InputError(
                f"ranks 0 and {other} made this call with different arguments: pass the same on every process. This "
                f"process has {call.settings}."
            )
        if text := different_states([row.drawing for row in rows], self._lines):
            raise InputError(text)
        for line in self._batches:
            holders = {rows[rank].samples: rank for rank in reversed(line) if rows[rank].samples}
            if len(holders) > 1:
                (one, first), (other, second) = sorted(holders.items(), key=lambda item: item[1])[:2]
                raise InputError(
                    f"rank {first} has a batch of {one} samples and rank {second} one of {other}: every sample needs a "
                    "target. Pass inputs and targets of the same batch, on every process."
                )
        if different_forms([[str(n or "") for n in (row.inputs, row.targets)] for row in rows], self._batches):
            forms = [text.split("\n") for text in self._exchange.gather("\n".join(batch.forms), call.number)]
            raise InputError(different_forms(forms, self._batches))
        sizes = [max(rows[rank].samples for rank in line) for line in self._replicas]
        return Agreed(
            fewest=min(sizes),
            most=max(sizes),
            all_samples=sum(max(rows[rank].samples for rank in line) for line in self._counted),
            labels=(sum(rows[rank].labels for rank in self._alike), sum(rows[rank].counting for rank in self._alike)),
            elements=(sum(rows[rank].elements for rank in self._alike), sum(rows[rank].weight for rank in self._alike)),
        )


def number_of_forms(forms: Sequence[str]) -> int:
    """A number from 1 to 65535 that other forms hardly have; 0 where a form is not known."""
    return crc32("\n".join(forms).encode()) % 0xFFFF + 1 if all(forms) else 0


def different_forms(forms: Sequence[Sequence[str]], batches: Sequence[Sequence[int]]) -> str:
    """The error text for ranks that read one batch in different forms; empty: there are none.

    Args:
        forms: of inputs and targets, by rank; empty where a rank reads none.
        batches: ranks that read the same batch.
    """
    for ranks in batches:
        for what, column in (("inputs", 0), ("targets", 1)):
            first: dict[str, int] = {}
            for rank in ranks:
                if len(forms[rank]) > column and forms[rank][column]:
                    first.setdefault(forms[rank][column], rank)
            if len(first) > 1:
                found = " and ".join(f"{form} on rank {rank}" for form, rank in first.items())
                return (
                    f"{what} are {found}: all ranks must pass the same batch. Pass the same {what} on every process, "
                    "or None where a process does not read them."
                )
    return ""
