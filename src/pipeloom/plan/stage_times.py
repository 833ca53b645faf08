"""Times of the stages of a transformer on a cluster, from its kernels and collectives. No torch.

    F      products, attention, elementwise operations, collectives of forwards
    I      the same for input gradients, and what is recomputed, with its collectives
    W      products of weight gradients; no collectives

per micro-batch, on one of the processes that share a stage; see `pipeloom.plan.costs.block_kernels`. Of experts, those
of a token count, and `imbalance` times as many on the busiest process, for which the others wait.

A collective of n bytes takes its bytes over the device's link, and one latency per message that follows another:

    all-reduce 2 (t-1)    all-gather, reduce-scatter, all-to-all t-1    broadcast, reduce, shift 1

What travels while the device computes, see `hidden_collectives`, does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.expert.traffic import Rows, balanced_rows
from pipeloom.parallel.inside_stage import InsideStage, StageTraffic
from pipeloom.parallel.tensor.grids.traffic import linear_traffic
from pipeloom.parallel.tensor.one_d.traffic import OneDTraffic
from pipeloom.parallel.traffic import Table, Traffic
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.block_kernels import BlockKernels
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.link_rate import LinkRate
from pipeloom.plan.costs.links import ORDER, ring_link, strides
from pipeloom.plan.costs.software import PIPELOOM, Software
from pipeloom.plan.hidden_collectives import RingSeconds, passes_hidden, products_hidden

_LOGIT_BYTES = 6  # per logit, in F and in I: mean of kernels that are fused and not
_EMBEDDING_PASSES = 2, 3  # of [tokens, width]: looked up; added to the gradients of rows
_UPDATE_BYTES, _STATE_BYTES = 24, 8  # per parameter: main, gradient, both number formats; of each number of state


class Seconds(NamedTuple):
    """Seconds of F, I and W of a layer or a stage, on one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float

    def __add__(self, other: "Seconds") -> "Seconds":  # type: ignore[override]  # by component
        return Seconds(self[0] + other[0], self[1] + other[1], self[2] + other[2])

    def times(self, factor: float) -> "Seconds":
        """All of them so many times as long."""
        return Seconds(factor * self[0], factor * self[1], factor * self[2])


def messages_in_turn(collective: str, degree: int) -> int:
    """Messages of a collective between `degree` processes that follow each other."""
    return {"all_reduce": 2 * (degree - 1), "broadcast": 1, "reduce": 1, "shift": 1}.get(collective, degree - 1)


def table_seconds(
    table: Table, axes: Mapping[str, int], links: Mapping[str, LinkRate], repeats: int = 1, call_seconds: float = 0.0
) -> float:
    """Seconds of the collectives of a table, one after the other.

    Args:
        table: calls and bytes.
        axes: the degree of each axis.
        links: the link of each axis.
        repeats: pieces in which each call is made.
        call_seconds: of each call, beside its messages.
    """
    seconds = 0.0
    for (axis, collective), sent in table.items():
        link, messages = links[axis], messages_in_turn(collective, axes[axis])
        rate = link.bytes_per_second
        if collective == "all_to_all":
            rate = link.flow_bytes_per_second or rate
        transfer = 0.0 if rate is None else sent.num_bytes / rate
        seconds += transfer + repeats * sent.calls * (messages * link.latency_seconds + call_seconds)
    return seconds


class _BlockParts(NamedTuple):
    """Seconds of a block that do not depend on recomputation.

    Attributes:
        matrices: forward, input gradients and weight gradients.
        attention, elementwise: forward and backward.
        hidden: collectives that pass meanwhile, forward and backward.
        hidden_attention: those of attention alone, forward.
        launches: numbers of kernels in F, I and W.
    """

    matrices: tuple[float, float, float]
    attention: tuple[float, float]
    elementwise: tuple[float, float]
    hidden: tuple[float, float]
    hidden_attention: float
    launches: tuple[float, float, float]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of layers on one process of a stage.

    Attributes:
        model: the sizes.
        inside: the processes that share a stage.
        cluster: what they run on.
        samples: per micro-batch.
        element: bytes per element of activations.
        recompute: activation recomputation.
        imbalance: load of the busiest expert-parallel process over the mean load.
        degrees: of the mesh axes "dp" and "pp".
        order: mesh axes, outermost first.
        software: what computes.
        slices: per micro-batch.
        free: axes whose collectives take no time.
    """

    model: Architecture
    inside: InsideStage
    cluster: Cluster
    samples: int
    element: int
    recompute: Recompute = Recompute.NONE
    imbalance: float = 1.0
    degrees: Mapping[str, int] = field(default_factory=dict)
    order: Sequence[str] = ORDER
    software: Software = PIPELOOM
    slices: int = 1
    free: frozenset[str] = frozenset()

    @cached_property
    def strides(self) -> dict[str, int]:
        """Devices from one process to the next along each mesh axis."""
        return strides({**self.degrees, "tp": self.inside.tensor, "cp": self.inside.context}, self.order)

    @cached_property
    def links(self) -> dict[str, LinkRate]:
        """The link of each axis. Processes that share experts are in neighbouring replicas, or share sequences."""
        inside, at = self.inside, self.strides
        near = {axis: (at["cp" if axis == "cp" else "tp"], degree) for axis, degree in inside.axes.items()}
        first = min(inside.expert_axes, key=lambda axis: at[axis])
        near["ep"] = at[first], inside.expert
        if len(inside.expert_axes) > 1 and inside.expert > inside.context:  # sequences first, then replicas
            near["ep"] = at["dp"], -(-inside.expert // inside.context)
        return {axis: LinkRate() if axis in self.free else ring_link(self.cluster, *near[axis]) for axis in near}

    @property
    def _host(self) -> float:
        return self.cluster.device.host_seconds

    @property
    def _waits(self) -> float:
        """Seconds per kernel or collective in which the host sees its end and launches the next one."""
        return 2 * self._host if self.software.synchronous else 0.0

    @cached_property
    def _kernels(self) -> KernelTimes:
        return KernelTimes(self.cluster, self.element, self._waits)

    @cached_property
    def _block(self) -> BlockKernels:
        return BlockKernels(
            model=self.model,
            inside=self.inside,
            samples=self.samples,
            kernels=self._kernels,
            software=self.software,
            imbalance=self.imbalance,
            slices=self.slices,
        )

    def _software(self, name: str) -> float:
        """Seconds of a block beyond its kernels, on a measured machine."""
        rates = self.cluster.rates
        return 0.0 if rates is None else self.slices * rates.second(name)

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch, all processes together."""
        return self.samples * self.model.sequence_length

    @cached_property
    def _axes(self) -> Mapping[str, int]:
        return self.inside.axes

    @cached_property
    def _traffic(self) -> StageTraffic:
        return self.inside.traffic(self.model.layer_sizes(self.samples, self.element))

    def collectives(self, traffic: Traffic) -> tuple[float, float]:
        """Seconds of the collectives of a layer, forward and backward, hidden ones included."""
        axes, links = self._axes, self.links
        forward, backward = (table_seconds(table, axes, links, self.slices, self._waits) for table in traffic)
        return forward, backward

    def block(self, *, experts: bool = False, recompute: Recompute | None = None) -> Seconds:
        """One block, with experts in place of an MLP or without; `recompute` in place of that of the layers."""
        kind = self.recompute if recompute is None else recompute
        if experts not in self._parts:
            self._parts[experts] = self._parts_of_block(experts)
        matrices, attention, elementwise, hidden, of_attention, kernels = self._parts[experts]
        forward, inputs, weights = matrices
        sends, returns = self.collectives(self.block_traffic(experts=experts, recompute=kind))
        sends -= hidden[0]
        returns -= hidden[1]
        computed = forward + attention[0] + elementwise[0] + self._software("block forward")
        repeats = {Recompute.NONE: (0.0, 0.0), Recompute.SELECTIVE: (attention[0], of_attention)}
        again, hidden_again = repeats.get(kind, (computed, hidden[0]))
        full = kind is Recompute.FULL
        if full and self.software.recomputes_all:
            returns += self._of_axis(self._one_d.row().forward)
        if self.software.hides_collectives:
            returns -= min(weights, 2 * self._of_axis(self._one_d.column(again=not full).backward))
        launches = [self._host * self.slices * count for count in kernels]
        back = launches[1] + launches[2] + (launches[0] if full else 0.0)
        backward = inputs + attention[1] + elementwise[1] + returns + again - hidden_again
        backward += self._software("block backward")
        return Seconds(max(computed + sends, launches[0]), max(backward, back - weights), weights)

    @cached_property
    def _parts(self) -> dict[bool, "_BlockParts"]:
        """Of blocks without and with experts, those that were asked for."""
        return {}

    def _parts_of_block(self, experts: bool) -> "_BlockParts":
        found = self._block
        products, attention = found.products(experts=experts), found.attention()
        of_attention = self._hidden_attention(attention[0])
        return _BlockParts(
            matrices=found.matrices(products),
            attention=attention,
            elementwise=found.elementwise(experts=experts),
            hidden=self._hidden(of_attention),
            hidden_attention=of_attention[0],
            launches=found.launches(products),
        )

    def block_traffic(self, *, experts: bool, recompute: Recompute | None = None) -> Traffic:
        """What one block sends, with experts or without; `recompute` in place of that of the layers."""
        kind = self.recompute if recompute is None else recompute
        return self._traffic.block(kind, experts=experts, rows=self._rows(experts))

    def embedding(self) -> Seconds:
        """The embedding: a look-up, and its collectives."""
        sends, returns = self.collectives(self._traffic.embedding())
        numbers = self.tokens / self.inside.context / self.inside.sample_parts * self.model.width
        look_up, add = (
            self._kernels.elementwise(passes * self.element * numbers, self.slices) for passes in _EMBEDDING_PASSES
        )
        return Seconds(look_up + sends, returns, add)

    def head(self) -> Seconds:
        """The last norm, the head and the loss."""
        model, product = self.model, self._kernels.product
        rows = self.tokens * self.inside.head_parts / self.inside.processes / self.slices
        columns = -(-model.vocabulary_size // self.inside.head_parts)
        forward, inputs, weights = (
            self.slices * each
            for each in (
                product(rows, columns, model.width),
                product(rows, model.width, columns),
                product(model.width, columns, rows),
            )
        )
        hidden = self._hidden_product(model.width, model.vocabulary_size, inward=True)
        norm, head = self.collectives(self._traffic.norm()), self.collectives(self._traffic.head())
        logits = self._kernels.elementwise(_LOGIT_BYTES * self.slices * rows * columns, 4 * self.slices)
        returns = norm[1] + head[1] - hidden[1]
        if self.software.hides_collectives:
            returns -= min(weights, self._of_axis(self._one_d.column().backward))
        return Seconds(forward + logits + norm[0] + head[0] - hidden[0], inputs + logits + returns, weights)

    def stages(self, blocks: Sequence[int]) -> list[Seconds]:
        """Stages with these numbers of blocks, the first with the embedding and the last with the head."""
        model, found, start = self.model, list[Seconds](), 0
        kinds = {experts: self.block(experts=experts) for experts in map(model.has_experts, range(model.layers))}
        for count in blocks:
            own = [kinds[model.has_experts(index)] for index in range(start, start + count)]
            found.append(Seconds(*map(sum, zip(*own, strict=True))) if own else Seconds(0.0, 0.0, 0.0))
            start += count
        found[0] += self.embedding()
        found[-1] += self.head()
        return found

    def message_bytes(self) -> float:
        """Bytes from one stage to the next, per process and micro-batch."""
        divided = self.inside.sequence or self.inside.grid or self.software.scatters
        parts = self.inside.context * (self.inside.tensor if divided else 1)
        return self.element * self.tokens * self.model.width / parts

    def update_seconds(self, parameters: float, states: float = 2.0) -> float:
        """Seconds of the optimizer's update of `parameters` elements with `states` numbers of state each."""
        return self._kernels.elementwise((_UPDATE_BYTES + _STATE_BYTES * states) * parameters, 0)

    def operations(self) -> float:
        """Operations of the model per micro-batch, all processes together: forward and backward, nothing repeated."""
        model = self.model
        attention = 2 * model.sequence_length * model.attention_width
        matrices = 2 * sum(model.block_numbers(experts=model.has_experts(index)) for index in range(model.layers))
        blocks = matrices + model.layers * attention
        return 3.0 * self.tokens * (blocks + 2 * model.width * model.vocabulary_size)

    def _hidden(self, of_attention: tuple[float, float]) -> tuple[float, float]:
        """Hidden seconds of the collectives of a block, forward and backward, of which those of attention are known."""
        model, found = self.model, [of_attention]
        if self.inside.layout in ("2d", "2.5d"):
            found += [self._hidden_product(model.width, model.qkv_features, inward=True)]
            found += [self._hidden_product(model.attention_width, model.width, inward=False)]
            found += [self._hidden_product(model.width, model.mlp_width, inward=True)] * (2 if model.gated else 1)
            found += [self._hidden_product(model.mlp_width, model.width, inward=False)]
        return sum(each[0] for each in found), sum(each[1] for each in found)

    def _hidden_attention(self, attention: float) -> tuple[float, float]:
        inside = self.inside
        hops, kind = inside.context, inside.context_kind
        if hops == 1 or kind == "ulysses":
            return 0.0, 0.0
        traffic, _ = self._traffic.attention()
        shifts, back = (self._seconds_of(table, "cp", "shift") for table in traffic)
        if kind == "ring-self-attention":
            hidden = passes_hidden(hops, attention / 2, shifts / (2 * (hops - 1)))
            return hidden, hidden
        ring = RingSeconds(hops, attention / hops, shifts / (hops - 1), (back - shifts) / (hops - 1))
        return ring.forward(), ring.backward()

    def _hidden_product(self, inputs: int, outputs: int, *, inward: bool) -> tuple[float, float]:
        """Hidden seconds of a layer on a grid, forward and backward."""
        shape = self.inside.grid
        if shape is None or shape.layout == "3d":
            return 0.0, 0.0
        tokens = self.tokens // self.inside.context
        table = linear_traffic(shape, tokens, inputs, outputs, self.element, inward=inward).forward
        x, weight = (self._seconds_of(table, axis, "broadcast") for axis in ("tp_column", "tp_row"))
        product = 2 * self.tokens * inputs * outputs / self.inside.processes / self._kernels.rate
        back = (products_hidden(shape.side, product, each) for each in (x, weight))
        return products_hidden(shape.side, product, x + weight), sum(back)

    @cached_property
    def _one_d(self) -> OneDTraffic:
        sizes = self.model.layer_sizes(self.samples, self.element)
        sizes = replace(sizes, sequence_length=sizes.sequence_length // self.inside.context)
        degree = self.inside.tensor if self.inside.grid is None else 1
        return OneDTraffic(sizes, degree, sequence=self.inside.sequence)

    def _of_axis(self, table: Table) -> float:
        return table_seconds(table, self._axes, self.links, self.slices, self._waits)

    def _seconds_of(self, table: Table, axis: str, collective: str) -> float:
        key = axis, collective
        return table_seconds({key: table[key]} if key in table else {}, self._axes, self.links)

    def _rows(self, experts: bool) -> Rows | None:
        """Assignments of the busiest process that pass experts of others."""
        sizes, inside = self.model.experts, self.inside
        if not experts or sizes is None:
            return None
        tokens = self.tokens // inside.context
        return balanced_rows(sizes, tokens, inside.expert, self.imbalance, samples=self.samples)
