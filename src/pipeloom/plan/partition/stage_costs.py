"""Times and memory of a stage with replicas in a synchronous step, see `pipeloom.plan.partition.dapple`.

A stage on r ranks splits every micro-batch of S samples, so that its largest share is ceil(S / r) of S samples, and r
is at most S. Without S, the share is 1 / r. With k stages behind it, 1F1B keeps min(k + 1, M) micro-batches in flight:

    bytes per rank = min(k + 1, M) * share * outputs + (1 + state_copies) * weights
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, folded
from pipeloom.plan.partition.problem import Array, Problem
from pipeloom.plan.partition.profile import MOST, Profile

Row = tuple[Any, Any, Any]  # F, B and AR of a stage, or of a transfer

_EQUAL = 1e-12  # relative difference of sums of floats in another order

# One entry per stage: the cuts (`Cuts`) in front of it and behind it, and its replicas.
Stages = Sequence[tuple[Any, Any, Any]]


class StageCosts:
    """F, B and AR of stages and of transfers between them, and memory per rank.

    Args:
        profile: of one micro-batch.
        ranks: number of ranks.
        bandwidth: bytes per second per rank.
        num_microbatches: micro-batches per step, M.
        context: processes of each rank that hold the same weights.
        memory_cap: maximum bytes per rank; None for no limit.
        state_copies: memory for gradients and optimizer states, in multiples of the weights.

    Attributes:
        shares: largest share of a micro-batch by number of replicas, shape (ranks + 1,); infinite where a replica
            would get no sample.
        most_replicas: of a stage.
        weights: bytes of stages, shape (cuts, cuts).

    Raises:
        InputError: a number out of range, or more ranks than samples for them.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        ranks: int,
        bandwidth: float,
        num_microbatches: int,
        context: int = 1,
        memory_cap: float | None = None,
        state_copies: float = 0.0,
    ) -> None:
        if not 1 <= num_microbatches <= MOST:
            rule = f"at most {MOST:g}" if num_microbatches > MOST else "at least 1"
            raise InputError(f"num_microbatches={folded(num_microbatches)}: must be {rule}.")
        levels = [(ranks, bandwidth)]
        self._problem = Problem(profile, levels, memory_cap=memory_cap, state_copies=state_copies)
        self.cuts, self.ranks, self.num_microbatches = self._problem.cuts, ranks, num_microbatches
        self._num_layers = len(profile.layers)
        self.samples, self.memory_cap = profile.samples, memory_cap
        self.bandwidth, self.context, self._copies = bandwidth, context, 1 + state_copies
        self.weights = self._problem.weights
        self.forward = self.cuts.totals([each.forward_seconds for each in profile.layers])
        self.backward = self.cuts.totals([each.backward_seconds for each in profile.layers])
        self.most_replicas = ranks if self.samples is None else min(ranks, self.samples)
        counts = np.arange(ranks + 1)
        with np.errstate(divide="ignore"):
            self.shares = 1.0 / counts
        if self.samples is not None:
            self.shares[1:] = -(-self.samples // counts[1:]) / self.samples
            self.shares[self.samples + 1 :] = np.inf
            most = int(self.cuts.sizes[-1]) * self.samples
            if ranks > most:
                raise InputError(
                    f"ranks={ranks}: {counted(self._num_layers, 'layer')} with {counted(self.samples, 'sample')} per "
                    f"micro-batch use at most {most} ranks, since each replica needs a sample. Use --ranks {most} or "
                    "fewer, or larger micro-batches."
                )

    def stage(self, first: Any, end: Any, replicas: Any) -> Row:
        """F, B and AR of the layers between two cuts."""
        weights, members = self._problem.weights[first, np.asarray(end) - 1], replicas * self.context
        share = self.shares[replicas]
        return (
            (self.forward[end] - self.forward[first]) * share,
            (self.backward[end] - self.backward[first]) * share,
            2 * (members - 1) * weights / (members * self.bandwidth),
        )

    def transfer(self, layer: Any, before: Any, behind: Any) -> Any:
        """Seconds of the output of the layer in front of `layer`, between stages with these numbers of replicas."""
        share = np.maximum(self.shares[before], self.shares[behind])
        with np.errstate(invalid="ignore"):
            return self._problem.cuts.crossing[np.asarray(layer) - 1] * share / self.bandwidth

    def rows(self, stages: Stages) -> Iterator[tuple[Any, ...]]:
        """F, B and AR of stages in a row, with the transfers between them."""
        rows = [self.stage(*stages[0])]
        for before, stage in pairwise(stages):
            seconds = self.transfer(stage[0], before[2], stage[2])
            rows += (seconds, seconds, 0.0), self.stage(*stage)
        return zip(*rows, strict=True)

    def memory_bytes(self, first: Any, end: Any, replicas: Any, in_flight: Any) -> Any:
        """Bytes per rank of a stage."""
        outputs, weights = (table[first, np.asarray(end) - 1] for table in (self._problem.kept, self._problem.weights))
        return np.minimum(in_flight, self.num_microbatches) * outputs * self.shares[replicas] + self._copies * weights

    def fits(self, first: Any, end: Any, replicas: Any, behind: Any) -> NDArray[np.bool_]:
        """Whether these are stages within the memory cap, with so many stages behind them."""
        held = self.memory_bytes(first, end, replicas, behind + 1)
        nested = self.cuts.nested[first, np.asarray(end) - 1]
        return np.asarray(nested & (held <= (np.inf if self.memory_cap is None else self.memory_cap * (1 + _EQUAL))))

    def least_ranks(self) -> Array:
        """Ranks that layers in front of a cut need at least for the memory cap, shape (stages behind + 1, cuts + 1)."""
        return self._least_ranks(np.inf if self.memory_cap is None else self.memory_cap * (1 + _EQUAL))

    def least_replicas(self, behind: int) -> Array:
        """Replicas that stages need for the memory cap with so many stages behind them, shape (cuts, cuts)."""
        return self._least_replicas(np.inf if self.memory_cap is None else self.memory_cap * (1 + _EQUAL), behind)

    def _least_ranks(self, cap: float) -> Array:
        """The layers in front of i with k stages behind them: the last of their stages has k stages behind it."""
        most = min(int(self.cuts.sizes[-1]), self.ranks)
        found = np.full((most + 2, self.cuts.count + 1), np.inf)
        found[:, 0] = 0.0
        for behind in reversed(range(most + 1)):
            one = self._least_replicas(cap, behind)  # of a stage from layer j to i - 1
            found[behind, 1:] = np.min(one + found[behind + 1, :-1, None], axis=0)
        return found

    def _least_replicas(self, cap: float, behind: int) -> Array:
        """Replicas that stages of layers first..last need, shape (cuts, cuts); infinite if none are enough."""
        room = cap - self._copies * self._problem.weights
        outputs = min(behind + 1, self.num_microbatches) * self._problem.kept
        with np.errstate(divide="ignore", invalid="ignore"):
            if self.samples is None:
                least = np.ceil(outputs / room)
            else:
                held = np.minimum(np.floor(room / outputs * self.samples), self.samples)
                least = np.ceil(self.samples / held)
        least = np.where(outputs > 0, np.maximum(least, 1.0), 1.0)
        return np.where(~self.cuts.nested | (room < 0) | ~(least <= self.ranks), np.inf, least)

    def check_memory(self) -> None:
        """Raises InputError if no partition is within the memory cap, with the smallest cap that one is within."""
        if self.memory_cap is None or self._possible(self.memory_cap):
            return
        low, high = self.memory_cap, 2 * self.memory_cap
        while not self._possible(high):
            low, high = high, 2 * high
        while high - low > max(1e-3, 1e-12 * high):
            middle = (low + high) / 2
            low, high = (low, middle) if self._possible(middle) else (middle, high)
        least = math.floor(high) if self._possible(math.floor(high)) else math.ceil(high)
        raise InputError(
            f"memory_cap={self.memory_cap:g}: every partition of {counted(self._num_layers, 'layer')} over "
            f"{counted(self.ranks, 'rank')} needs at least {least} bytes on some rank. Raise memory_cap "
            f"(--memory-cap) to {least}."
        )

    def _possible(self, cap: float) -> bool:
        return bool(self._least_ranks(cap * (1 + _EQUAL))[0, -1] <= self.ranks)
