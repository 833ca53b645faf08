"""Calls that no rank runs because the batch of one is invalid.

    rank 0   F F . . ◀─┐ R        R: the rank tells its neighbours, drops the call, and raises InputError
    rank 1   . . . R ──┤
    rank 2   R ────────┘          its batch is invalid: it runs nothing and tells its neighbours

A refusal travels in place of the values of a step, so a valid step costs nothing. Every rank waits for another before
its first backward ends, so all of them hear of it before a gradient is complete. Ranks that need more than this, such
as data-parallel replicas, agree before anything runs (`agreement`); so do evaluations, whose first ranks wait for
no other, and which also agree on the number of micro-batches.
"""

from collections.abc import Iterable

from pipeloom.errors import InputError, unwrapped
from pipeloom.ir import Program
from pipeloom.transport.call_numbers import refusal_number
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import flatten


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
