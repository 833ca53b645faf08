"""What a partition is judged by: seconds and bytes of stages with replicas, by PipeDream's two papers or corrected.

A stage of layers i..j with r replicas on components that are joined by bandwidth B takes, for each minibatch,

    published  max(compute, sync) / r          (arXiv:1806.03377; SOSP 2019, doi:10.1145/3341301.3359646)
    summed     (compute + sync) / r

`compute` is the sum of forward and backward of its layers, and `sync` what summing its gradients over the replicas
takes once: with W bytes of weights

    4 (r - 1) W / (r B)     of the first paper, and always of `summed`: each replica sends and receives 2 (r - 1) / r W
    2 (r - 1) W / B         of the second paper, for `published` on several levels (of more than one component each)

The two differ where one level stands alone, so one of them has to be taken: a cluster in which only one level has more
than one component is flat, however it is written, and the first paper's, which is about flat clusters, holds for it.

**What is corrected.** `published` lets a stage compute and synchronise at the same time, to the end. But a gradient is
there when the backward has made it, that of the first layer last, and the next minibatch must find the new weights: the
end of the sum is always waited for, and all of it where replicas begin to sum when their backward ends. The optimizer
that the authors published adds the two as well. `summed` also counts a sum alike on every level; the second paper's
formula has no 1 / r, so that for 16 replicas it says 8 times what the first does.

On levels, `compute` is what the best pipeline inside of one component takes (see `pipeline`). Between neighbouring
stages, 2 a / B seconds go by for each minibatch, of an output of `a` bytes and its gradient; they may overlap with all
else in both forms.

**Memory of a rank**, in bytes: `in_flight (weights + activations) + state_copies weights`. A stage has
`in_flight = ceil(replicas of it and of all stages behind / its replicas)` minibatches that await their backward. It
keeps the weights that each used (PipeDream's weight stashing) and the outputs of all its layers. `state_copies` is for
gradients (1) and the optimizer's state (SGD with momentum 1 more, AdamW 2 more).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, folded
from pipeloom.plan.partition.profile import MOST, Profile
from pipeloom.split.layer_chain import Tie, weights_added

Array = NDArray[np.float64]
Form = Literal["summed", "published"]
_MOST_STEPS = 10**12  # of the dynamic programme: one to six hours on one core, measured at 1e8 to 4e8 of them


class Level(NamedTuple):
    """Components that are joined alike, such as 4 devices of a node, or 4 nodes; `bytes_per_second` of each of them."""

    components: int
    bytes_per_second: float


def check_levels(levels: Sequence[tuple[int, float]]) -> None:
    """Refuse what is no cluster.

    Raises:
        InputError: there are no levels, or a number of one is impossible.
    """
    if not levels:
        raise InputError("there are no levels: a cluster has one at least; give components and bandwidth")
    for components, bandwidth in levels:
        if components < 1:
            raise InputError(f"ranks {folded(components)}: a level has 1 component or more; raise it")
        if not 1 / MOST <= bandwidth <= MOST:
            raise InputError(f"bandwidth {bandwidth}: it is a finite number of bytes per second, above 0; correct it")


class Problem:
    """A profile, the cluster, and how a partition is judged.

    Args:
        profile: of one minibatch.
        levels: innermost first; one level is a flat cluster.
        form: "summed" or "published", see above.
        memory_cap: most bytes a rank may hold; None for no limit.
        state_copies: of the weights, beside the versions.

    Attributes:
        compute, weights, kept: shape (layers, layers): of layers i..j, the seconds, bytes of weights (tied ones once),
            bytes of outputs.
        outputs: shape (layers,): bytes of each layer's output.

    Raises:
        InputError: a number is impossible, or the form unknown.
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
            raise InputError(f"form {form!r} is unknown: it is {' or '.join(get_args(Form))}; choose one")
        check_levels(levels)
        if memory_cap is not None and not (math.isfinite(memory_cap) and memory_cap > 0):
            raise InputError(f"memory cap {memory_cap}: it is a finite number of bytes, above 0; correct it")
        if not 0 <= state_copies <= MOST:
            raise InputError(f"state copies {state_copies}: it is a finite number, 0 or more; correct it")
        self.profile, self.form, self.memory_cap, self.state_copies = profile, form, memory_cap, state_copies
        self.num_layers = len(profile.layers)
        # A level of one component changes nothing.
        self.levels = [Level(*level) for level in levels if level[0] > 1] or [Level(*levels[0])]
        self.hierarchical = len(self.levels) > 1
        self.num_ranks = math.prod(level.components for level in self.levels)
        if self._num_steps() > _MOST_STEPS:
            raise InputError(
                f"{counted(self.num_layers, 'layer')} on {folded(self.num_ranks)} ranks: finding their partition "
                "would take hours; take layers together, or plan for a part of the ranks"
            )
        self.compute = _range_sums([layer.forward_seconds + layer.backward_seconds for layer in profile.layers])
        self.weights = _range_sums([layer.parameter_bytes for layer in profile.layers], profile.ties)
        self.kept = _range_sums([layer.activation_bytes for layer in profile.layers])
        self.outputs = np.array([layer.activation_bytes for layer in profile.layers], dtype=np.float64)

    def _num_steps(self) -> int:
        """Of the dynamic programme, at most: see `pipeline`.

        A cap needs the tables inside of a component once for each number of ranks behind it: one for every pair of
        replicas and components behind them, and no more than there are ranks.
        """
        steps, tables, power = 0, 1, 2
        for level in reversed(self.levels):
            steps += tables * level.components**2 * self.num_layers**power
            if self.memory_cap is not None:
                tables = min(tables * level.components * (level.components + 1) // 2, self.num_ranks + 1)
            power = 3
        return steps

    def sync_seconds(self, weights: Array, replicas: int, level: int) -> Array:
        """Of one sum of gradients over the replicas of a stage."""
        bandwidth = self.levels[level].bytes_per_second
        if self.hierarchical and self.form == "published":
            return 2 * (replicas - 1) * weights / bandwidth
        return 4 * (replicas - 1) * weights / (replicas * bandwidth)

    def both(self, one: Array, other: Array) -> Array:
        """What two kinds of work of a stage take together."""
        return one + other if self.form == "summed" else np.maximum(one, other)

    def stage_seconds(self, inside: Array, weights: Array, replicas: int, level: int) -> Array:
        """A minibatch's time on a stage of which one replica takes `inside`."""
        return self.both(inside, self.sync_seconds(weights, replicas, level)) / replicas

    def inside_seconds(self, seconds: float, weights: float, replicas: int, level: int) -> float:
        """What one replica may take so that its stage takes `seconds`, the inverse of `stage_seconds`."""
        sync = float(self.sync_seconds(np.float64(weights), replicas, level)) if self.form == "summed" else 0.0  # type: ignore[arg-type]
        return seconds * replicas - sync

    def transfer_seconds(self, level: int) -> Array:
        """Behind each layer, shape (layers,)."""
        return 2 * self.outputs / self.levels[level].bytes_per_second

    def memory_bytes(self, first: int, replicas: int, behind: NDArray[np.int64]) -> Array:
        """Of a rank whose stage begins with layer `first`, with so many ranks behind it: shape (behind, last layer)."""
        in_flight = -(-(replicas + behind) // replicas)
        return self.held_bytes(self.weights[first, first:], self.kept[first, first:], in_flight[:, None])

    def held_bytes(self, weights: Array, kept: Array, in_flight: NDArray[np.int64]) -> Array:
        """Of a rank with so many minibatches in flight, whose stage has these bytes of weights and of outputs."""
        return in_flight * (weights + kept) + self.state_copies * weights


def _range_sums(values: Sequence[float], ties: Sequence[Tie] = ()) -> Array:
    """``[i, j]``: the sum of values i..j; added from i on, so that equal ranges have equal sums."""
    table = np.zeros((len(values), len(values)))
    for first in range(len(values)):
        table[first, first:] = np.cumsum(weights_added(values, ties, first))
    return table
