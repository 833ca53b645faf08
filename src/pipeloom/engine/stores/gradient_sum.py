"""Sum the gradients of parameters that several ranks hold: tied embeddings, stages with replicas.

`GradientExchange` is one rank's part in the sums of one group of parameters. Every member of the group sends its
gradients to the others and adds all of them in order of rank, so that all members get the same bits. Two more things
travel along: a few values of each parameter, by which members notice that their parameters differ, and `SharedBuffers`.
Streams exchange gradients in the same way (see `pipeloom.training.stream.replica_gradients`).

`GradientSum` does this for the steps of a synchronous schedule. A sum covers one step: gradients that earlier steps
left in ``.grad`` are set aside before and added back after, so several steps before one optimizer step add up exactly.
Gradients are exchanged in parts, so that those of others and the sums need little memory:

    send 1   send 2, receive 1, add 1   send 3, receive 2, add 2   ...
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pipeloom.common.division import gradient_parts
from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.shared_buffers import SharedBuffers
from pipeloom.errors import RunError
from pipeloom.transport.interface import Channel, Lane, Transport
from pipeloom.transport.values import Value, flatten, unflatten

_NUM_SAMPLED = 16
# Of a parameter's largest sampled value: machines may round differently, and half precision is coarse.
_TOLERANCE = 0.01

Shared = Mapping[str, tuple[nn.Parameter, tuple[int, ...]]]  # name -> this rank's parameter, the ranks that hold it
Gradients = Mapping[str, Tensor | None]  # by name; None where a parameter has no gradient
FLATTEN_ERROR = "gradients to be summed hold"  # how the error about a value that cannot travel begins


class GradientExchange:
    """One rank's part in the sums of one group of parameters.

    Args:
        shared: the parameters of the group that this rank holds, in an order that all ranks agree on. Gradients are
            added in the order of the ranks that it names.
        buffers: those that the ranks of the group share.
        value: of a parameter by its name, wherever the parameter is.

    Attributes:
        shared: as given.
        peers: the other ranks of the group.
    """

    def __init__(self, rank: int, shared: Shared, buffers: SharedBuffers, value: Callable[[str], Tensor]) -> None:
        self._rank, self.shared, self._buffers, self._value = rank, shared, buffers, value
        self.peers = sorted(buffers.ranks.union(*(ranks for _, ranks in shared.values())) - {rank})
        # Both sides know the names and list them alike, so names do not travel.
        self._names = {peer: [name for name, (_, ranks) in shared.items() if peer in ranks] for peer in self.peers}
        self._device = next((parameter.device for parameter, _ in shared.values()), None)
        self._sent_samples: dict[int, Tensor] = {}
        self._received: dict[int, Gradients] = {}
        self._buffer_values: dict[str, Tensor | None] = {}

    def messages(self, own: Gradients, *, first: bool = True, last: bool = True) -> Iterator[tuple[int, Value]]:
        """What to send to each peer.

        Args:
            own: gradients of this rank.
            first: whether samples of the parameters travel along.
            last: whether shared buffers travel along.
        """
        if last:
            self._buffers.look()
        for peer in self.peers:
            names = self._names[peer]
            sample = None
            if first:
                values = [_few(self._value(name)).to(device=self._device) for name in names]
                sample = self._sent_samples[peer] = torch.cat(values) if values else torch.empty(0)
            yield peer, (tuple(own[name] for name in names), self._buffers.to_send(peer) if last else {}, sample)

    def take(self, peer: int, message: Value) -> None:
        """Take what `peer` made by `messages`.

        Raises:
            RunError: a parameter is not the same on both ranks.
        """
        gradients, buffer_values, sample = message
        names = self._names[peer]
        if sample is not None:
            parameters = {name: self.shared[name][0] for name in names}
            _check_alike(parameters, self._sent_samples.pop(peer), sample, peer)
        self._received[peer] = dict(zip(names, gradients, strict=True))
        self._buffer_values.update(buffer_values)

    def total(self, own: Gradients, *, last: bool = True) -> dict[str, Tensor | None]:
        """The sum of every parameter's gradients, in new memory; None where no rank has a gradient."""
        received = {self._rank: own, **self._received}
        sums: dict[str, Tensor | None] = {}
        for name, (_, ranks) in self.shared.items():
            total: Tensor | None = None
            for rank in ranks:
                part = received[rank][name]
                if part is not None:
                    total = part.clone() if total is None else total.add_(part)
            sums[name] = total
        self._received.clear()
        if last:
            self._buffers.take(self._buffer_values)
            self._buffer_values.clear()
        return sums


class GradientSum:
    """One rank's part in all its gradient groups.

    Args:
        groups: by the stage of the REDUCE_GRAD in this rank's program, the parameters to sum, and the buffers that the
            ranks of the group share.
        transport: with the gradient lane's channels open.
        value: of a parameter by its name, wherever the parameter is.
    """

    def __init__(
        self,
        rank: int,
        groups: Mapping[int, tuple[Shared, SharedBuffers]],
        transport: Transport,
        value: Callable[[str], Tensor],
    ) -> None:
        self._rank, self._groups, self._transport, self._value = rank, groups, transport, value
        self._set_aside: dict[str, Tensor | None] = {}

    def begin(self) -> None:
        """Set aside the gradients that earlier steps left."""
        for shared, _ in self._groups.values():
            for name, (parameter, _) in shared.items():
                self._set_aside[name] = parameter.grad
                parameter.grad = None

    def cancel(self) -> None:
        """Put back what is still set aside: the run was refused."""
        for shared, _ in self._groups.values():
            for name, (parameter, _) in shared.items():
                if name in self._set_aside:
                    parameter.grad = self._set_aside.pop(name)

    def bind(self, stage: int) -> list[Step]:
        """The functions of one REDUCE_GRAD: for each part, send to all, receive from each, add."""
        found, buffers = self._groups[stage]
        exchanges = [
            GradientExchange(self._rank, part, SharedBuffers(self._rank, {}), self._value) for part in _parts(found)
        ]
        if buffers.ranks or not exchanges:
            exchanges.append(GradientExchange(self._rank, {}, buffers, self._value))
        sends, others = zip(*map(self._bind_part, exchanges), strict=True)
        steps: list[Step] = [(sends[0], None)]
        for number, rest in enumerate(others):
            steps += [(send, None) for send in sends[number + 1 : number + 2]]
            steps += rest
        return steps

    def _bind_part(self, exchange: GradientExchange) -> tuple[Callable[[], None], list[Step]]:
        """What sends a part, and what receives and adds up the same of others."""
        shared = exchange.shared
        outgoing = {peer: self._transport.outgoing(Channel(self._rank, peer, Lane.GRADIENT)) for peer in exchange.peers}

        def own() -> Gradients:
            return {name: parameter.grad for name, (parameter, _) in shared.items()}

        def send() -> None:
            for peer, content in exchange.messages(own()):
                outgoing[peer].send(*flatten(content, FLATTEN_ERROR))

        def bind_receive(peer: int) -> Step:
            end = self._transport.incoming(Channel(peer, self._rank, Lane.GRADIENT))

            def receive() -> None:
                message = end.receive()
                exchange.take(peer, unflatten(message.layout, message.tensors))

            return receive, end.ready

        def add() -> None:
            for name, total in exchange.total(own()).items():
                before = self._set_aside.pop(name)
                sums = total if before is None else before if total is None else before.add_(total)
                shared[name][0].grad = sums

        return send, [*map(bind_receive, exchange.peers), (add, None)]


def _parts(shared: Shared) -> list[Shared]:
    """The parameters in parts, the same on all ranks that hold them."""
    found: list[Shared] = []
    for holders in sorted({ranks for _, ranks in shared.values()}):
        sizes = {name: each.nbytes for name, (each, ranks) in shared.items() if ranks == holders}
        found += [{name: shared[name] for name in names} for names in gradient_parts(sizes)]
    return found


def _few(parameter: Tensor) -> Tensor:
    """At most `_NUM_SAMPLED` values from all over a parameter."""
    values = parameter.detach().reshape(-1)
    return values[:: max(1, -(-len(values) // _NUM_SAMPLED))]


def _check_alike(parameters: Mapping[str, Tensor], mine: Tensor, theirs: Tensor, peer: int) -> None:
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
                f"parameter {name!r} is not the same on this rank and on rank {peer}: all ranks that hold a parameter "
                "must start from the same values and update it alike. Set one seed on all ranks, and give each "
                "Pipeline's parameters() to an optimizer with the same options."
            )
