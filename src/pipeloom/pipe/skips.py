"""The skips of a `Pipe`, and their ways between partitions (see `pipeloom.split.skippable`)."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from pipeloom.errors import PipeTypeError
from pipeloom.split.skippable import SkipKey, pairing_error, skips_of


def verify_skippables(module: nn.Sequential) -> None:
    """Check that each skip is stashed by one module and popped by one module behind it.

    Raises:
        PipeTypeError: a skip that does not pair; the message lists all of them.
    """
    problem = pairing_error(module._modules.items())
    if problem is not None:
        raise PipeTypeError(problem)


class SkipRoutes(NamedTuple):
    """Skips between partitions.

    Attributes:
        sent: for each partition, the skips that a later partition pops, with that partition.
        received: for each partition, the skips that an earlier partition stashes, with that partition.
    """

    sent: list[dict[SkipKey, int]]
    received: list[dict[SkipKey, int]]


def skip_routes(partitions: Sequence[nn.Sequential]) -> SkipRoutes:
    """Where the values of skips go."""
    routes = SkipRoutes([{} for _ in partitions], [{} for _ in partitions])
    homes: dict[SkipKey, int] = {}
    for index, partition in enumerate(partitions):
        for layer in partition:
            stashes, pops = skips_of(layer)
            homes.update(dict.fromkeys(stashes, index))
            for key in pops:
                if homes[key] != index:
                    routes.sent[homes[key]][key] = index
                    routes.received[index][key] = homes[key]
    return routes
