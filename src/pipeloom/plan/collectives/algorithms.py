"""Two algorithms per collective: one sends chunks along a ring, the other has few steps, as a tree.

Costs are those of the Hockney model: a message of n bytes takes α + n β seconds, and a rank sends one and receives one
at a time. Sources:

    Pjesivac 2007    J. Pjesivac-Grbovic, T. Angskun, G. Bosilca, G. Fagg, E. Gabriel, J. Dongarra: Performance analysis
                     of MPI collective operations. Cluster Computing 10 (2).
    Patarasuk 2009   P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations.
                     Journal of Parallel and Distributed Computing 69 (2).
    Thakur 2005      R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH.
                     International Journal of High Performance Computing Applications 19 (1).
    Bruck 1997       J. Bruck, C.-T. Ho, S. Kipnis, E. Upfal, D. Weathersby: Efficient algorithms for all-to-all
                     communications in multiport message-passing systems. IEEE Transactions on Parallel and Distributed
                     Systems 8 (11).
    steps            counted: neighbours pass on one chunk per step

Each algorithm has its steps as data, and the closed form of their number and sizes; a test compares them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from pipeloom.plan.collectives import steps
from pipeloom.plan.collectives.sends import Step

Pattern = Literal["ring", "flow", "pairs", "shift"]


class Round(NamedTuple):
    """Equal steps of an algorithm.

    Attributes:
        times: their number.
        part: of the n bytes in the largest message.
        pattern: "ring": every rank, or some, to its neighbour in a ring; "flow": every rank to one at any distance,
            all distances in turn; "pairs": few ranks, at most one of each group of `distance`, to the next group;
            "shift": every rank to the one at `distance`.
        distance: between source and target.
    """

    times: int
    part: Fraction
    pattern: Pattern
    distance: int = 1


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to run a collective.

    Attributes:
        collective: a name of `COLLECTIVES`.
        kind: "ring" or "tree".
        name: in the literature.
        formula: of its seconds, for p ranks and n bytes; L is log2 p, rounded up.
        source: of algorithm and formula.
        chunks: number of chunks for a number of ranks.
        steps: its sends for a number of ranks.
        rounds: the closed form of them.
    """

    collective: str
    kind: Literal["ring", "tree"]
    name: str
    formula: str
    source: str
    chunks: Callable[[int], int]
    steps: Callable[[int], tuple[Step, ...]]
    rounds: Callable[[int], list[Round]]

    def num_steps(self, ranks: int) -> int:
        """Messages that follow each other."""
        return sum(each.times for each in self.rounds(ranks))

    def moved(self, ranks: int) -> Fraction:
        """Bytes of these messages, as a multiple of n."""
        return sum((each.times * each.part for each in self.rounds(ranks)), Fraction(0))

    def chunk_part(self, ranks: int) -> Fraction:
        """Bytes of a chunk, as a part of n."""
        return Fraction(1, ranks if self.collective == "all-to-all" else self.chunks(ranks))


def _ring(times: int) -> Callable[[int], list[Round]]:
    """`times` (p - 1) steps of n / p bytes."""
    return lambda ranks: [Round(times * (ranks - 1), Fraction(1, ranks), "ring")] if ranks > 1 else []


def _flow(ranks: int) -> list[Round]:
    return [Round(ranks - 1, Fraction(1, ranks), "flow")] if ranks > 1 else []


def _doubling(part: Callable[[int, int], Fraction], pattern: Pattern, *, down: bool) -> Callable[[int], list[Round]]:
    """A step per power of two below p, from the largest distance `down` or from the smallest up."""

    def rounds(ranks: int) -> list[Round]:
        distances = [1 << level for level in range(steps.levels(ranks))]
        ordered = reversed(distances) if down else distances
        return [Round(1, part(ranks, far), pattern, far) for far in ordered]

    return rounds


def _all(ranks: int, far: int) -> Fraction:
    return Fraction(1)


def _group(ranks: int, far: int) -> Fraction:
    return Fraction(min(far, ranks - far), ranks)


def _with_bit(ranks: int, far: int) -> Fraction:
    """Numbers below p with the bit of `far`."""
    rounds, rest = divmod(ranks, 2 * far)
    return Fraction(rounds * far + max(0, rest - far), ranks)


def _each(ranks: int) -> int:
    return ranks


def _one(ranks: int) -> int:
    return 1


def _square(ranks: int) -> int:
    return ranks * ranks


_ONCE, _TWICE = "(p-1) (α + n/p β)", "2 (p-1) (α + n/p β)"
_WHOLE, _WHOLES, _HALVES = "L (α + n β)", "2 L (α + n β)", "L α + (p-1)/p n β"
_DOWN, _UP = _doubling(_all, "pairs", down=True), _doubling(_all, "pairs", down=False)
_JOINED, _SPLIT = _doubling(_group, "pairs", down=False), _doubling(_group, "pairs", down=True)
_NEAR, _FAR = _doubling(_group, "shift", down=True), _doubling(_group, "shift", down=False)
_BITS = _doubling(_with_bit, "shift", down=False)


def _both(ranks: int) -> list[Round]:
    return _UP(ranks) + _DOWN(ranks)


_A = Algorithm
# fmt: off
_ROWS = (
    _A("broadcast", "ring", "pipelined chain", _TWICE, "Pjesivac 2007", _each, steps.chain_broadcast, _ring(2)),
    _A("broadcast", "tree", "binomial tree", _WHOLE, "Thakur 2005", _one, steps.binomial_broadcast, _DOWN),
    _A("reduce", "ring", "pipelined chain", _TWICE, "Pjesivac 2007", _each, steps.chain_reduce, _ring(2)),
    _A("reduce", "tree", "binomial tree", _WHOLE, "Thakur 2005", _one, steps.binomial_reduce, _UP),
    _A("all-reduce", "ring", "ring", _TWICE, "Patarasuk 2009", _each, steps.ring_all_reduce, _ring(2)),
    _A("all-reduce", "tree", "binomial tree", _WHOLES, "Thakur 2005", _one, steps.binomial_all_reduce, _both),
    _A("gather", "ring", "chain", _ONCE, "steps", _each, steps.chain_gather, _ring(1)),
    _A("gather", "tree", "binomial tree", _HALVES, "Thakur 2005", _each, steps.binomial_gather, _JOINED),
    _A("all-gather", "ring", "ring", _ONCE, "Thakur 2005", _each, steps.ring_all_gather, _ring(1)),
    _A("all-gather", "tree", "Bruck", _HALVES, "Bruck 1997", _each, steps.bruck_all_gather, _FAR),
    _A("scatter", "ring", "chain", _ONCE, "steps", _each, steps.chain_scatter, _ring(1)),
    _A("scatter", "tree", "binomial tree", _HALVES, "Thakur 2005", _each, steps.binomial_scatter, _SPLIT),
    _A("reduce-scatter", "ring", "ring", _ONCE, "Patarasuk 2009", _each, steps.ring_reduce_scatter, _ring(1)),
    _A("reduce-scatter", "tree", "reversed Bruck", _HALVES, "Bruck 1997", _each, steps.bruck_reduce_scatter, _NEAR),
    _A("all-to-all", "ring", "pairwise", _ONCE, "Thakur 2005", _square, steps.pairwise, _flow),
    _A("all-to-all", "tree", "Bruck", "at most L (α + n/2 β)", "Bruck 1997", _square, steps.bruck_all_to_all, _BITS),
)
# fmt: on
ALGORITHMS: Mapping[str, tuple[Algorithm, Algorithm]] = {
    ring.collective: (ring, tree) for ring, tree in zip(_ROWS[::2], _ROWS[1::2], strict=True)
}
