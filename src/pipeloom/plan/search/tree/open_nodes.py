"""The open nodes of a search, the one that looks best first. No torch here.

Bounds of partial configurations are less tight, so they count a little more (weighted A*, Pohl 1970), and complete ones
are simulated early. In a search that ends, meshes take turns: the more candidates of a mesh were tried, the more its
others count. They are close to those that were tried.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from itertools import count
from math import inf
from typing import Any, NamedTuple

_FACTORS = (1.25, 1.22, 1.08, 1.0)  # of bounds, by level
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


class OpenNodes:
    """Nodes by their keys.

    Args:
        turns: whether meshes take turns.
    """

    def __init__(self, *, turns: bool) -> None:
        self._turns = turns
        self._heap: list[tuple[float, int, float, int, float, int, Node]] = []
        self._number = count()
        self._tried: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node, penalty: float) -> None:
        """Add a node whose bound counts `penalty` times."""
        tried = self._tried[node.family] if self._turns and node.family is not None else 0
        key = node.bound * _FACTORS[node.level] * penalty * (1 + _TRIED * tried)
        heapq.heappush(self._heap, (key, -node.level, node.bound, next(self._number), penalty, tried, node))

    def pop(self) -> Node:
        """The node that looks best."""
        while True:
            *_, penalty, tried, node = heapq.heappop(self._heap)
            if node.family is None or not self._turns:
                return node
            if tried == self._tried[node.family]:
                self._tried[node.family] += 1
                return node
            self.push(node, penalty)

    @property
    def key(self) -> float:
        """That of the node that looks best; infinite without nodes."""
        return self._heap[0][0] if self._heap else inf

    def least(self, *, loose: bool) -> float:
        """The least bound, of plans whose bounds are loose too; infinite without nodes."""
        return min((min(node.bound, node.loose if loose else inf) for *_, node in self._heap), default=inf)
