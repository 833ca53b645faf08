"""Sum the gradients of parameters that several ranks hold: tied embeddings, stages with replicas.

Every member of a group sends its gradients to the others and adds what it gets in order of rank. So all copies get the
same bits. The sum covers one step: what earlier steps left in ``.grad`` is set aside before and added back after, so
several steps before one optimizer step add up exactly. Buffers that the members share travel along (see
`pipeloom.engine.stores.shared_buffers`), and a few values of each parameter, by which members notice that their
copies differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.shared_buffers import SharedBuffers
from pipeloom.errors import RunError
from pipeloom.transport.interface import Channel, Lane, Message, Transport
from pipeloom.transport.values import flatten, unflatten

_NUM_SAMPLED = 16
# Of a parameter's largest sampled value: machines may round differently, and half precision is coarse.
_TOLERANCE = 0.01

Shared = Mapping[str, tuple[nn.Parameter, tuple[int, ...]]]  # canonical name -> this rank's copy, ranks that hold it


class GradientSum:
    """One rank's part in all its gradient groups.

    Args:
        rank: this rank.
        groups: for the stage under which a program's REDUCE_GRAD stands on this rank, the parameters to sum.
        buffers: for the same stages, the buffers that the ranks of the group share.
        transport: with the gradient lane's channels open.
        value: of a parameter by its name, wherever it is.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[int, Shared],
        buffers: Mapping[int, SharedBuffers],
        transport: Transport,
        value: Callable[[str], Tensor],
    ) -> None:
        self._rank, self._value = rank, value
        self._groups = groups
        self._buffers = buffers
        self._transport = transport
        self._set_aside: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set aside the gradients that earlier steps left."""
        for shared in self._groups.values():
            for name, (parameter, _) in shared.items():
                self._set_aside[name] = parameter.grad
                parameter.grad = None

    def bind(self, stage: int) -> list[Step]:
        """The functions of one REDUCE_GRAD: send to all, receive from each, add."""
        shared, buffers = self._groups[stage], self._buffers[stage]
        peers = sorted(buffers.ranks.union(*(ranks for _, ranks in shared.values())) - {self._rank})
        received: dict[int, dict[str, Tensor | None]] = {}
        counting: dict[str, Tensor | None] = {}  # values of the buffers' copies that count
        sampled: dict[int, Tensor] = {}  # what was sent of the parameters' values
        # Both sides know the names and list them alike, so only the gradients travel.
        names = {
            rank: sorted(name for name, (_, ranks) in shared.items() if rank in ranks) for rank in (self._rank, *peers)
        }
        device = next((parameter.device for parameter, _ in shared.values()), None)
        outgoing = [self._transport.outgoing(Channel(self._rank, peer, Lane.GRADIENT)) for peer in peers]

        def send() -> None:
            received[self._rank] = {name: shared[name][0].grad for name in names[self._rank]}
            buffers.look()
            for peer, end in zip(peers, outgoing, strict=True):
                gradients = tuple(received[self._rank][name] for name in names[peer])
                sampled[peer] = sample((self._value(name) for name in names[peer]), device)
                value = (gradients, buffers.to_send(peer), sampled[peer])
                end.send(*flatten(value, "gradients to be summed hold"))

        steps: list[Step] = [(send, None)]
        for peer in peers:
            incoming = self._transport.incoming(Channel(peer, self._rank, Lane.GRADIENT))

            def receive(peer: int = peer, take: Callable[[], Message] = incoming.receive) -> None:
                message = take()
                gradients, values, theirs = unflatten(message.layout, message.tensors)
                check_alike({name: shared[name][0] for name in names[peer]}, sampled.pop(peer), theirs, peer)
                received[peer] = dict(zip(names[peer], gradients, strict=True))
                counting.update(values)

            steps.append((receive, incoming.ready))

        def add() -> None:
            for name, (parameter, ranks) in shared.items():
                parts = [received[rank][name] for rank in sorted(ranks)]
                total = sum_in_order([part for part in parts if part is not None])
                before = self._set_aside.pop(name)
                parameter.grad = total if before is None else before if total is None else before.add_(total)
            buffers.take(counting)
            received.clear()
            counting.clear()

        steps.append((add, None))
        return steps


def sample(parameters: Iterable[Tensor], device: torch.device | None = None) -> Tensor:
    """At most `_NUM_SAMPLED` values from all over each parameter; all on a `device`, where some are elsewhere."""
    values = [_few(parameter).to(device=device) for parameter in parameters]
    return torch.cat(values) if values else torch.empty(0)


def _few(parameter: Tensor) -> Tensor:
    values = parameter.detach().reshape(-1)
    return values[:: max(1, -(-len(values) // _NUM_SAMPLED))]


def check_alike(parameters: Mapping[str, Tensor], mine: Tensor, theirs: Tensor, peer: int) -> None:
    """Compare the samples of all `parameters`; raises RunError where one is not the same here and on rank `peer`."""
    if torch.equal(mine, theirs):
        return
    sizes = [len(_few(parameter)) for parameter in parameters.values()]
    for name, one, other in zip(parameters, torch.split(mine, sizes), torch.split(theirs, sizes), strict=True):
        if not len(one):
            continue
        near = (one - other).abs() <= _TOLERANCE * one.abs().nan_to_num(0.0).max()
        if not (near | (one == other) | (one.isnan() & other.isnan())).all():
            raise RunError(
                f"parameter {name!r} is not the same on this rank and on rank {peer}: every rank has a copy, and all "
                "start from the same values and are updated alike; set one seed on all ranks, and give each Pipeline's "
                "parameters() to an optimizer with the same options"
            )


def sum_in_order(parts: Sequence[Tensor]) -> Tensor | None:
    """The sum in order, in new memory; None where nobody has a gradient."""
    if not parts:
        return None
    total = parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    return total
