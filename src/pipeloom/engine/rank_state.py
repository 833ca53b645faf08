"""`RankState`: the values that one rank holds while its program runs, and their lifetimes.

    arrived[stage, b]    input of a forward, from RECV_F or the previous chunk on this rank     until F
    saved[stage, b]      input leaves and roots of the autograd graph: one live activation      F to B or I
                         after a split backward's I, what its W needs: the same activation      I to W
    gradients[stage, b]  gradient of a stage's output, from RECV_B or the next chunk            until B or I
    departing[action]    a result that another rank needs                                       until its SEND
    contexts[stage, b]   keys and values of a micro-batch in slices                             F to B of its slice 0
    tokens[stage, b]     a micro-batch's tokens on this context-parallel rank                   F to B or I
    declared[stage, b]   auxiliary losses of a forward that are trained                         F to B or I
    skip_values[t, b, s]     values from stage s for stage t                                    until the F of t
    skip_gradients[s, b, t]  their gradients                                                    until the B or I of s
    skip_counts[stage, b]    the number of input leaves, and of those of every stage it uses    F to B or I

Only the graph of a stage's output is kept. Its values are not read again after they are sent.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.autograd.recomputation import recomputed
from pipeloom.autograd.split_backward import Root, WeightGradients
from pipeloom.common.division import even_parts
from pipeloom.devices import Device
from pipeloom.engine.activation_mover import ActivationMover, Key
from pipeloom.engine.batch import Batch, Extent
from pipeloom.engine.elsewhere import Elsewhere
from pipeloom.ir import Action, Program, Skip
from pipeloom.ir.recompute import Recompute
from pipeloom.slicing import SequenceParts, SliceContext, Tokens
from pipeloom.split.stage_module import may_change_input, running
from pipeloom.transport.call_numbers import num_samples_of, out_of_step
from pipeloom.transport.interface import Transport
from pipeloom.transport.values import Layout, Value

LossFn = Callable[[Any, Any], Tensor | Mapping[str, Any]]

# One part of an action: the function that runs it, and a function that says whether it would run without blocking.
Step = tuple[Callable[[], None], Callable[[], bool] | None]
Record = tuple[Action, float, float]  # an action, and when it started and ended (time.perf_counter, seconds)
Binder = Callable[["RankState", Action, Program], Step]


class DeclaredRoot(NamedTuple):
    """An auxiliary loss of one forward that is trained.

    Attributes:
        root: of its graph.
        value: without the graph.
        weight: its factor.
        samples: of its micro-batch; of a slice, its part of them.
    """

    root: Root
    value: Tensor
    weight: float
    samples: float


def refuse_other_call(source: int, theirs: int, ours: int) -> None:
    """Raises RunError: rank `source` sent a message of call `theirs`, and this rank is in call `ours`."""
    raise out_of_step(source, theirs, ours)


@dataclass(slots=True, eq=False)
class RankWiring:
    """What all runs of one rank share.

    Attributes:
        rank, stages: the rank, and its modules by stage.
        loss_fn: ``loss_fn(output, target)`` of one micro-batch, a scalar or a dict with it; used on the last stage.
        transport: with all channels of the programs open.
        sliced: whether micro-batches run in slices, even if in one.
        parts: cuts sequences between context-parallel ranks; None: this rank has whole sequences.
        recompute: what backwards recompute, per stage of the model.
        mover: moves saved activations, where programs have OFFLOAD and RELOAD.
        skips: by pair of stages, the names of the values that skip stages between them.
        device: where the rank computes.
        elsewhere: parameters that only other ranks train.
        second: the stages whose actions are in the second stream of the device (`pipeloom.engine.pair_streams`).
        forwards: by stage, the function that F calls in training: the module, or a wrapper that saves less.
        copies_input: by stage, whether it receives a copy of its input: the caller's batch, and leaves, must not change
            in place.
        runs_known: stages, and whether they train, whose first run has shown whether they work in place.
    """

    rank: int
    stages: dict[int, nn.Module]
    loss_fn: LossFn | None
    transport: Transport
    sliced: bool
    parts: SequenceParts | None
    recompute: Sequence[Recompute]
    mover: ActivationMover | None
    skips: Mapping[Skip, tuple[str, ...]]
    device: Device
    elsewhere: Elsewhere
    second: frozenset[int] = frozenset()
    forwards: dict[int, Callable[..., Value]] = field(init=False)
    copies_input: dict[int, bool] = field(init=False)
    runs_known: set[tuple[int, bool]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.forwards = {stage: recomputed(module, self.recompute[stage]) for stage, module in self.stages.items()}
        # Inputs of stage 0 are no leaves: its first run shows whether it works in place (`binders.inputs`).
        self.copies_input = {stage: stage > 0 and may_change_input(module) for stage, module in self.stages.items()}

    def between_streams(self, stage: int, other: int) -> bool:
        """Whether two stages are on this rank, in different streams."""
        here = stage in self.stages and other in self.stages
        return here and (stage in self.second) != (other in self.second)


@dataclass(slots=True, eq=False)
class RankState:
    """Values that the bound actions of one rank read and write; for the stores see the top of this file.

    Attributes:
        wiring: what all runs share.
        extents: where a slice starts and ends, from its F to its B.
        loss_weights: by micro-batch and slice of the last stage, its share of the batch, from F to B.
        num_offloaded: entries of `saved` that are offloaded.
        peak_live: peak number of entries of `saved` in the last run, without offloaded ones.
        to_offload: the entries of `saved` that the next program to be bound offloads.
        batch: of the running step.
        call: number of the running step in its messages (see `pipeloom.transport.interface`).
        other_call: called with a message of another call, as `refuse_other_call`; the message is dropped if it returns.
        last_refused: number of the last call that a rank refused; messages of calls up to it are dropped.
        loss_scale: the factor of the loss in its backward.
        seeds: gradients in which backwards of the loss start, kept for the next step.
        arrive: takes the tensors of a message, and returns those that its RECV hands on; None: the same.
        count_samples: in a stream, returns the samples of a micro-batch and of its batch.
    """

    wiring: RankWiring
    arrived: dict[Key, tuple[Value, list[Tensor], tuple[int, ...]]] = field(default_factory=dict)
    saved: dict[Key, tuple[list[Tensor], list[Root]] | WeightGradients | None] = field(default_factory=dict)
    gradients: dict[Key, Sequence[Tensor | None]] = field(default_factory=dict)
    departing: dict[Action, tuple[Layout, list[Tensor]]] = field(default_factory=dict)
    contexts: dict[tuple[int, int], SliceContext] = field(default_factory=dict)
    tokens: dict[tuple[int, int], Tokens] = field(default_factory=dict)
    declared: dict[Key, list[DeclaredRoot]] = field(default_factory=dict)
    skip_values: dict[Key, tuple[dict[str, Value], dict[str, Value], list[Tensor]]] = field(default_factory=dict)
    skip_gradients: dict[Key, Sequence[Tensor | None]] = field(default_factory=dict)
    skip_counts: dict[Key, list[int]] = field(default_factory=dict)
    extents: dict[Key, Extent] = field(default_factory=dict)
    loss_weights: dict[Key, float] = field(default_factory=dict)
    num_offloaded: int = 0
    peak_live: int = 0
    to_offload: Set[Key] = frozenset()
    batch: Batch = field(default_factory=Batch)
    call: int = 0
    other_call: Callable[[int, int, int], None] = refuse_other_call
    last_refused: int = 0
    loss_scale: float = 1.0
    seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = field(default_factory=dict)
    count_samples: Callable[[int], tuple[int, int]] | None = None
    arrive: Callable[[Action, list[Tensor]], list[Tensor]] | None = None

    def begin(self, batch: Batch, call: int) -> None:
        """Start a run."""
        self.batch, self.call, self.peak_live = batch, call, 0

    def clear(self) -> None:
        """Drop everything, also after an error."""
        self.forget()
        self.batch = Batch()
        running.layer = None

    def forget(self) -> None:
        """Drop computed values; keep the batch."""
        for context in self.contexts.values():
            context.close()
        for store in (
            self.arrived,
            self.saved,
            self.gradients,
            self.departing,
            self.contexts,
            self.tokens,
            self.declared,
            self.skip_values,
            self.skip_gradients,
            self.skip_counts,
            self.extents,
        ):
            store.clear()
        self.loss_weights.clear()
        self.num_offloaded = 0
        if self.wiring.mover is not None:
            self.wiring.mover.forget()

    def samples_in(self, microbatch: int, num_microbatches: int) -> int:
        """The samples of a micro-batch that has arrived here; of this replica."""
        if self.count_samples is not None:
            return self.count_samples(microbatch)[0]
        return even_parts(num_samples_of(self.call), num_microbatches)[microbatch]

    def all_samples(self, microbatch: int) -> int:
        """The samples of all replicas in the batch of a micro-batch."""
        if self.count_samples is not None:
            return self.count_samples(microbatch)[1]
        return self.batch.all_samples or num_samples_of(self.call)

    def seed(self, weight: float, like: Tensor) -> Tensor:
        """The gradient of the whole step's loss by one micro-batch's loss."""
        key = (weight, like.dtype, like.device)
        seed = self.seeds.get(key)
        if seed is None or seed.shape != like.shape:
            seed = self.seeds[key] = torch.full_like(like, weight, requires_grad=False)
        return seed
