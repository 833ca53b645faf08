"""The open nodes of a search, the one that looks best first. No torch here.

Bounds of partial configurations are less tight, so they count a little more (weighted A*, Pohl 1970), and complete ones
are simulated early. Where bounds of partial ones are far too low, none would be simulated for long: a search can ask
for the best complete one. In a search that ends, meshes take turns: the more candidates of a mesh were tried, the more
its others count. They are close to those that were tried.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import count
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

_FACTORS = (1.25, 1.22, 1.08, 1.0)  # of bounds, by level
COMPLETE = len(_FACTORS) - 1  # the level of candidates
_TRIED = 0.02  # of a bound, for each candidate of the same mesh that was tried


class Node(NamedTuple):
    """A part of the space.

    Attributes:
        level: group, mesh, shape or candidate, counted from 0.
        bound: the value of its plans, at least.
        loose: the same with those whose bounds are loose; infinite without any.
        expand: what makes the nodes inside of it, or simulates it.
        given: arguments of `expand`.
        family: of candidates, their mesh.
    """

    level: int
    bound: float
    expand: Callable[..., None]
    given: tuple[Any, ...]
    family: Hashable = None
    loose: float = inf


_Entry = tuple[float, int, float, int, float, int, Node]


class OpenNodes:
    """Nodes by their keys.

    Args:
        turns: whether meshes take turns.
    """

    def __init__(self, *, turns: bool) -> None:
        self._turns = turns
        self._partial: list[_Entry] = []
        self._complete: list[_Entry] = []  # nodes whose expansion simulates them
        self._number = count()
        self._tried: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._partial) + len(self._complete)

    def push(self, node: Node, penalty: float) -> None:
        """Add a node whose bound counts `penalty` times."""
        tried = self._tried[node.family] if self._turns and node.family is not None else 0
        key = node.bound * _FACTORS[node.level] * penalty * (1 + _TRIED * tried)
        heap = self._complete if node.level == COMPLETE else self._partial
        heapq.heappush(heap, (key, -node.level, node.bound, next(self._number), penalty, tried, node))

    def pop(self, *, complete: bool = False) -> Node:
        """The node that looks best; of complete ones, if there are any."""
        while True:
            *_, penalty, tried, node = heapq.heappop(self._complete if complete and self._complete else self._first)
            if node.family is None or not self._turns:
                return node
            if tried == self._tried[node.family]:
                self._tried[node.family] += 1
                return node
            self.push(node, penalty)

    @property
    def _first(self) -> list[_Entry]:
        """The heap with the node that looks best; there is one."""
        return min((heap for heap in (self._partial, self._complete) if heap), key=itemgetter(0))

    @property
    def key(self) -> float:
        """That of the node that looks best; infinite without nodes."""
        return self._first[0][0] if self else inf

    def least(self, *, loose: bool) -> float:
        """The least bound, of plans whose bounds are loose too; infinite without nodes."""
        nodes = (entry[-1] for entry in (*self._partial, *self._complete))
        return min((min(node.bound, node.loose if loose else inf) for node in nodes), default=inf)
