"""Calls that no rank runs because the batch of one is invalid.

    rank 0   F F . . ◀─┐ R        R: the rank tells its neighbours, drops the call, and raises InputError
    rank 1   . . . R ──┤
    rank 2   R ────────┘          its batch is invalid: it runs nothing and tells its neighbours

A refusal travels in place of the values of a step, so a valid step costs nothing. Every rank waits for another before
its first backward ends, so all of them hear of it before a gradient is complete. Ranks that need more than this, such
as data-parallel replicas, agree before anything runs (`BatchAgreement`); so do evaluations, whose first ranks wait for
nobody, and which also agree on the number of micro-batches.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from pipeloom.errors import InputError, unwrapped
from pipeloom.ir import Program
from pipeloom.transport.call_numbers import refusal_number
from pipeloom.transport.connect import Connection
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten

_LOST = "another rank ended before all ranks had read their batches; see its error"


class PeerRefused(InputError):  # noqa: N818  # named after the event, like PeerLost
    """Another rank refused the call that runs; caught by the executor, which raises InputError."""


def refused_by(rank: int, error: Exception) -> str:
    """The error of the other ranks."""
    return f"rank {rank} cannot use its batch, so no rank runs this call: {unwrapped(str(error))}"


def send_refusals(transport: Transport, channels: Iterable[Channel], rank: int, call: int, text: str) -> None:
    """Tell every rank that may wait for a message of `call` from `rank`."""
    for channel in sorted(channels):
        if channel.source == rank and channel.lane in (Lane.PIPELINE, Lane.SKIP):
            transport.outgoing(channel).send(*flatten(text), refusal_number(call))


def all_ranks_run_all_microbatches(program: Program) -> bool:
    """Whether every micro-batch runs on every rank: then none is done on all ranks while one runs nothing."""
    place, stages = program.placement, range(program.placement.num_stages)
    return all(
        len({place.rank_of(stage, b) for stage in stages}) == program.num_ranks for b in range(program.num_microbatches)
    )


class Agreed(NamedTuple):
    """What all processes know about the batches of a call.

    Attributes:
        fewest, most: samples in the smallest and the largest batch of a replica.
        all_samples: of all replicas.
    """

    fewest: int
    most: int
    all_samples: int


class BatchAgreement:
    """Exchanges the sizes of batches between all processes before a call.

    Args:
        connection: to the other processes.
        replica_ranks: see `Sharing`.
    """

    def __init__(self, connection: Connection, replica_ranks: Sequence[int]) -> None:
        self._members, self._timeout = connection.members, connection.timeout_seconds
        self._replicas = connection.replicas
        self._counted = [line for line in self._replicas if {*line} & {*replica_ranks}] or [
            line for line in self._replicas if self._members is not None and self._members.rank in line
        ]

    def agree(self, num_samples: int, refusal: Exception | None) -> Agreed:
        """One all-reduce over all processes, each of which calls it.

        Args:
            num_samples: of the batch that this process reads; 0 where it reads none.
            refusal: why it cannot use its batch.

        Raises:
            InputError: a process cannot use its batch, or those of one replica have different sizes; on all processes.
            PeerLost: a process ended or timed out.
        """
        assert self._members is not None
        own = torch.zeros(self._members.size, dtype=torch.int64)
        own[self._members.rank] = -1 if refusal is not None else num_samples
        counts = self._members.sum(own, self._timeout).tolist()
        if min(counts) < 0:
            text = "" if refusal is None else refused_by(self._members.rank, refusal)
            texts = self._members.gather(text.encode(), lost=_LOST, timeout_seconds=self._timeout)
            raise refusal or InputError(next(filter(None, texts)).decode())
        for line in self._replicas:
            found = {counts[rank]: rank for rank in reversed(line) if counts[rank]}
            if len(found) > 1:
                (one, first), (other, second) = sorted(found.items(), key=lambda item: item[1])[:2]
                raise InputError(
                    f"rank {first} has a batch of {one} samples and rank {second} one of {other}: every sample needs a "
                    "target. Pass inputs and targets of the same batch, on every process."
                )
        sizes = [max(counts[rank] for rank in line) for line in self._replicas]
        all_samples = sum(max(counts[rank] for rank in line) for line in self._counted)
        return Agreed(min(sizes), max(sizes), all_samples)
