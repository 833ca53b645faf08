"""Sum the gradients of parameters that several ranks hold: tied embeddings, stages with replicas.

Every member of a group sends its gradients to the others and adds what it gets in order of rank. So all copies get the
same bits. The sum covers one step: what earlier steps left in ``.grad`` is set aside before and added back after, so
several steps before one optimizer step add up exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from pipeloom.runtime.transport import Channel, Lane, Message, Transport
from pipeloom.runtime.values import flatten, unflatten

Shared = Mapping[str, tuple[nn.Parameter, tuple[int, ...]]]  # canonical name -> this rank's copy, ranks that hold it


class GradientSum:
    """One rank's part in all its gradient groups.

    Args:
        rank: this rank.
        groups: for the stage under which a program's REDUCE_GRAD stands on this rank, the parameters to sum.
        transport: with the gradient lane's channels open.
    """

    def __init__(self, rank: int, groups: Mapping[int, Shared], transport: Transport) -> None:
        self._rank = rank
        self._groups = groups
        self._transport = transport
        self._set_aside: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set aside the gradients that earlier steps left."""
        for shared in self._groups.values():
            for name, (parameter, _) in shared.items():
                self._set_aside[name] = parameter.grad
                parameter.grad = None

    def bind(self, stage: int) -> list[tuple[Callable[[], None], Callable[[], bool] | None]]:
        """The functions of one REDUCE_GRAD: send to all, receive from each, add."""
        shared = self._groups[stage]
        peers = sorted({rank for _, ranks in shared.values() for rank in ranks} - {self._rank})
        received: dict[int, dict[str, Tensor | None]] = {}
        # Both sides know the names and list them alike, so only the gradients travel.
        names = {
            rank: sorted(name for name, (_, ranks) in shared.items() if rank in ranks) for rank in (self._rank, *peers)
        }
        outgoing = [self._transport.outgoing(Channel(self._rank, peer, Lane.GRADIENT)) for peer in peers]

        def send() -> None:
            received[self._rank] = {name: shared[name][0].grad for name in names[self._rank]}
            for peer, end in zip(peers, outgoing, strict=True):
                end.send(*flatten(tuple(received[self._rank][name] for name in names[peer])))

        steps: list[tuple[Callable[[], None], Callable[[], bool] | None]] = [(send, None)]
        for peer in peers:
            incoming = self._transport.incoming(Channel(peer, self._rank, Lane.GRADIENT))

            def receive(peer: int = peer, take: Callable[[], Message] = incoming.receive) -> None:
                message = take()
                received[peer] = dict(zip(names[peer], unflatten(message.layout, message.tensors), strict=True))

            steps.append((receive, incoming.ready))

        def add() -> None:
            for name, (parameter, ranks) in shared.items():
                parts = [received[rank][name] for rank in sorted(ranks)]
                total = _sum([part for part in parts if part is not None])
                before = self._set_aside.pop(name)
                parameter.grad = total if before is None else before if total is None else before.add_(total)
            received.clear()

        steps.append((add, None))
        return steps


def _sum(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum in order, in new memory; None where nobody has a gradient."""
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total
