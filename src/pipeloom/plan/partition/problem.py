"""The cost model of a partition: seconds and bytes of stages with replicas, by PipeDream's two papers or corrected.

A stage of layers i..j with r replicas on components with bandwidth B takes, per minibatch,

    published  max(compute, sync) / r          (arXiv:1806.03377; SOSP 2019, doi:10.1145/3341301.3359646)
    summed     (compute + sync) / r

`compute` is the sum of forward and backward of its layers. `sync` is one gradient all-reduce over the replicas, with W
bytes of weights:

    4 (r - 1) W / (r B)     of the first paper, and always of `summed`: each replica sends and receives 2 (r - 1) / r W
    2 (r - 1) W / B         of the second paper, for `published` on several levels (of more than one component each)

The two formulas differ for a single level. A cluster in which only one level has more than one component counts as
flat, and the first paper's formula, which is about flat clusters, applies.

**Corrections.** `published` assumes that compute and sync of a stage overlap fully. But the backward produces the
gradient of the first layer last, and the next minibatch needs the new weights. So the end of the all-reduce is always
exposed, and all of it where replicas start it after their backward. The partitioner that the authors released adds the
two as well. `summed` also uses the same formula on every level; the second paper's lacks 1 / r, so for 16 replicas its
sync is 8 times as long.

On several levels, `compute` is the time of the best pipeline inside one component (see `stage_search`). Transfers
overlap with everything else in both forms. Between stages with r and q replicas, an output of `a` bytes and its
gradient take, per minibatch,

    published  2 a / B
    summed     2 a / (B min(r, q))

Minibatch b goes from replica `b mod r` to replica `b mod q`, so each of r replicas sends one of r minibatches, and each
of q receives one of q. The side with fewer replicas is the slower. The papers leave the division out; the partitioner
that the authors released divides by the replicas of the stage at either end.

**Memory per rank**, in bytes: `in_flight (weights + activations) + state_copies weights`. A stage has
`in_flight = ceil(replicas of this and all later stages / its replicas)` minibatches in flight. It keeps the weights of
each (PipeDream's weight stashing) and the outputs of all its layers. `state_copies` covers gradients (1) and optimizer
states (SGD with momentum: 1 more, AdamW: 2 more).
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipeloom.errors import InputError, folded
from pipeloom.plan.partition.cuts import Cuts
from pipeloom.plan.partition.profile import MOST, Profile

Array = NDArray[np.float64]
Form = Literal["summed", "published"]


class Level(NamedTuple):
    """Components with equal links, such as 4 devices of a node, or 4 nodes; `bytes_per_second` per component."""

    components: int
    bytes_per_second: float


def check_levels(levels: Sequence[tuple[int, float]]) -> None:
    """Validate the levels of a cluster.

    Raises:
        InputError: no levels, or a number out of range.
    """
    if not levels:
        raise InputError("levels=(): a cluster needs at least one level. Give components and bandwidth.")
    for components, bandwidth in levels:
        if components < 1:
            raise InputError(f"ranks={folded(components)}: must be at least 1, also the number before @ in --levels.")
        if not 1 / MOST <= bandwidth <= MOST:
            raise InputError(f"bandwidth={bandwidth}: must be above 0, in bytes per second. Use for example 1e9.")


class Problem:
    """A profile, the cluster, and the cost model.

    Args:
        profile: of one minibatch.
        levels: innermost first; one level is a flat cluster.
        form: "summed" or "published", see this module.
        memory_cap: maximum bytes per rank; None for no limit.
        state_copies: memory for gradients and optimizer states, in multiples of the weights.

    Attributes:
        cuts: where the model can be cut.
        compute, weights, kept: seconds, bytes of weights (tied ones once) and bytes of outputs of the layers i..j of
            `cuts`, shape (cuts, cuts); what is no stage takes infinite time and memory.

    Raises:
        InputError: a number out of range, or an unknown form.
    """

    def __init__(
        self,
        profile: Profile,
        levels: Sequence[tuple[int, float]],
        *,
        form: Form = "summed",
        memory_cap: float | None = None,
        state_copies: float = 0.0,
    ) -> None:
        if form not in get_args(Form):
            raise InputError(f"form={form!r}: must be {' or '.join(get_args(Form))}.")
        check_levels(levels)
        if memory_cap is not None and not (math.isfinite(memory_cap) and memory_cap > 0):
            raise InputError(f"memory_cap={memory_cap}: must be above 0 and finite, in bytes. Raise it.")
        if not 0 <= state_copies <= MOST:
            raise InputError(
                f"state_copies={state_copies}: must be from 0 to {MOST:g}: the memory of gradients and optimizer "
                "states, in multiples of the weights. Use 0 for none, or 3 for AdamW."
            )
        self.profile, self.form, self.memory_cap, self.state_copies = profile, form, memory_cap, state_copies
        self.num_layers = len(profile.layers)
        # A level of one component changes nothing.
        self.levels = [Level(*level) for level in levels if level[0] > 1] or [Level(*levels[0])]
        self.num_ranks = math.prod(level.components for level in self.levels)
        self.cuts = Cuts(profile)
        self.compute, self.kept, self.weights = self.cuts.tables(
            [layer.forward_seconds + layer.backward_seconds for layer in profile.layers],
            [layer.activation_bytes for layer in profile.layers],
            [layer.parameter_bytes for layer in profile.layers],
            ties=profile.ties,
        )
        for table in (self.compute, self.kept):
            table[~self.cuts.nested] = np.inf

    def sync_seconds(self, weights: Array, replicas: int, level: int) -> Array:
        """Seconds of one gradient all-reduce over the replicas of a stage."""
        bandwidth = self.levels[level].bytes_per_second
        if len(self.levels) > 1 and self.form == "published":
            return 2 * (replicas - 1) * weights / bandwidth
        return 4 * (replicas - 1) * weights / (replicas * bandwidth)

    def both(self, one: Array, other: Array) -> Array:
        """The time of two kinds of work of a stage, by the form."""
        return one + other if self.form == "summed" else np.maximum(one, other)

    def stage_seconds(self, inside: Array, weights: Array, replicas: int, level: int) -> Array:
        """Seconds per minibatch of a stage whose replicas each take `inside`."""
        return self.both(inside, self.sync_seconds(weights, replicas, level)) / replicas

    def inside_seconds(self, seconds: float, weights: float, replicas: int, level: int) -> float:
        """The time per replica for which the stage takes `seconds`: the inverse of `stage_seconds`."""
        sync = float(self.sync_seconds(np.float64(weights), replicas, level)) if self.form == "summed" else 0.0  # type: ignore[arg-type]
        return seconds * replicas - sync

    def transfer_seconds(self, level: int, replicas: int) -> Array:
        """Seconds per minibatch of a transfer at each cut, shape (cuts + 1,).

        Args:
            level: of the cluster.
            replicas: of the stage at one end; with that of the other end, the longer of the two times counts.
        """
        ways = replicas if self.form == "summed" else 1
        return np.concatenate(([0.0], 2 * self.cuts.crossing / (self.levels[level].bytes_per_second * ways)))

    def memory_bytes(self, first: int, replicas: int, behind: NDArray[np.int64]) -> Array:
        """Bytes per rank of stages from layer `first`, with `behind` ranks behind them: shape (behind, last layer)."""
        in_flight = -(-(replicas + behind) // replicas)
        return self.held_bytes(self.weights[first, first:], self.kept[first, first:], in_flight[:, None])

    def held_bytes(self, weights: Array, kept: Array, in_flight: NDArray[np.int64]) -> Array:
        """Bytes per rank of a stage with these bytes of weights and outputs."""
        return in_flight * (weights + kept) + self.state_copies * weights
