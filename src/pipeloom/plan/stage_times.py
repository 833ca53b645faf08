"""Times of the stages of a transformer on a cluster, from arithmetic, memory traffic and collectives. No torch.

    F      arithmetic of forwards, elementwise operations, collectives of forwards
    I      the same for input gradients, and what is recomputed, with its collectives
    W      arithmetic of weight gradients; no collectives

per micro-batch. Arithmetic is divided by the processes that share a stage. Per token, a matrix of N numbers takes 2 N
operations in F, I and W each; causal attention over S tokens of width W 2 S W in F and 4 S W in I. Of experts, those of
a token count, and `imbalance` times as many on the busiest process, for which the others wait.

A collective of n bytes takes its bytes over the device's link, and one latency per message that follows another:

    all-reduce 2 (t-1)    all-gather, reduce-scatter, all-to-all t-1    broadcast, reduce, shift 1

What travels while the device computes, see `hidden_collectives`, does not count.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.ir.recompute import Recompute
from pipeloom.parallel.expert.traffic import Rows, balanced_rows
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.tensor.grids.traffic import linear_traffic
from pipeloom.parallel.traffic import Table, Traffic
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.cluster import Cluster, LinkRate, device_link
from pipeloom.plan.hidden_collectives import RingSeconds, passes_hidden, products_hidden

# Reads and writes of a tensor outside matrix products, per forward; a backward has twice as many.
_PASSES_STREAM = 10  # of [tokens, width]: two norms (2 each), two additions to the residual stream (3 each)
_PASSES_MLP, _PASSES_GATED = 2, 3  # of [tokens, mlp_width]: GELU; SiLU times the other half
_PASSES_ROW = 5  # of [assignments, width]: in the order of experts (2), and weighted into the residual stream (3)
_PASSES_QKV = 2  # of queries, keys and values: rotary positions
_OPTIMIZER_BYTES = 40  # Adam, per parameter: main, two moments (read and write, 24), gradient, both number formats


class Seconds(NamedTuple):
    """Seconds of F, I and W of a layer or a stage, on one micro-batch."""

    forward: float
    backward_input: float
    backward_weight: float

    def __add__(self, other: "Seconds") -> "Seconds":  # type: ignore[override]  # by component
        return Seconds(*(a + b for a, b in zip(self, other, strict=True)))


def messages_in_turn(collective: str, degree: int) -> int:
    """Messages of a collective between `degree` processes that follow each other."""
    return {"all_reduce": 2 * (degree - 1), "broadcast": 1, "reduce": 1, "shift": 1}.get(collective, degree - 1)


def table_seconds(table: Table, axes: Mapping[str, int], links: Mapping[str, LinkRate]) -> float:
    """Seconds of the collectives of a table, one after the other.

    Args:
        table: calls and bytes.
        axes: the degree of each axis.
        links: the link of each axis.
    """
    seconds = 0.0
    for (axis, collective), sent in table.items():
        link, messages = links[axis], messages_in_turn(collective, axes[axis])
        transfer = 0.0 if link.bytes_per_second is None else sent.num_bytes / link.bytes_per_second
        seconds += transfer + sent.calls * messages * link.latency_seconds
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
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
        devices_per_replica: processes of a whole pipeline, between neighbouring replicas.
    """

    model: Architecture
    inside: InsideStage
    cluster: Cluster
    samples: int
    element: int
    recompute: Recompute = Recompute.NONE
    imbalance: float = 1.0
    devices_per_replica: int = 1

    @property
    def links(self) -> dict[str, LinkRate]:
        """The link of each axis. Along tp, innermost, devices follow each other; along cp, groups of them.

        Processes that share experts are in neighbouring replicas, or share sequences.
        """
        inside = self.inside
        span = {"cp": inside.processes, "ep": inside.processes}
        if inside.expert_axes != ("cp",):
            replicas = -(-inside.expert // (inside.context if "cp" in inside.expert_axes else 1))
            span["ep"] = replicas * max(self.devices_per_replica, inside.processes)
        return {axis: device_link(self.cluster, span.get(axis, inside.tensor)) for axis in inside.axes}

    @property
    def tokens(self) -> int:
        """Of a micro-batch, all processes together."""
        return self.samples * self.model.sequence_length

    def collectives(self, traffic: Traffic) -> tuple[float, float]:
        """Seconds of the collectives of a layer, forward and backward, hidden ones included."""
        axes, links = self.inside.axes, self.links
        return table_seconds(traffic.forward, axes, links), table_seconds(traffic.backward, axes, links)

    def block(self, *, experts: bool = False) -> Seconds:
        """One block, with experts in place of an MLP or without."""
        matrices = self._product(self._matrix_numbers(experts=experts))
        attention, elementwise = self._attention(), self._elementwise(experts=experts)
        forward, backward = self.collectives(self.block_traffic(experts=experts))
        hidden = self._hidden(attention)
        forward -= hidden[0]
        backward -= hidden[1]
        repeats = {Recompute.NONE: (0.0, 0.0), Recompute.SELECTIVE: (attention, self._hidden_attention(attention)[0])}
        again, hidden_again = repeats.get(self.recompute, (matrices + attention + elementwise, hidden[0]))
        return Seconds(
            matrices + attention + elementwise + forward,
            matrices + 2 * (attention + elementwise) + backward + again - hidden_again,
            matrices,
        )

    def block_traffic(self, *, experts: bool) -> Traffic:
        """What one block sends, with experts or without."""
        stage = self.inside.traffic(self.model.layer_sizes(self.samples, self.element))
        return stage.block(self.recompute, experts=experts, rows=self._rows(experts))

    def embedding(self) -> Seconds:
        """The embedding: its collectives."""
        traffic = self.inside.traffic(self.model.layer_sizes(self.samples, self.element)).embedding()
        forward, backward = self.collectives(traffic)
        return Seconds(forward, backward, 0.0)

    def head(self) -> Seconds:
        """The last norm, the head and the loss."""
        model = self.model
        product = self._product(model.width * model.vocabulary_size)
        hidden = self._hidden_product(model.width, model.vocabulary_size, inward=True)
        stage = self.inside.traffic(model.layer_sizes(self.samples, self.element))
        norm, head = self.collectives(stage.norm()), self.collectives(stage.head())
        logits = self._traffic(4 * 2 * self.tokens * model.vocabulary_size / self.inside.processes)
        return Seconds(
            product + logits + norm[0] + head[0] - hidden[0], product + logits + norm[1] + head[1] - hidden[1], product
        )

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
        parts = self.inside.context * (self.inside.tensor if self.inside.sequence or self.inside.grid else 1)
        return self.element * self.tokens * self.model.width / parts

    def update_seconds(self, parameters: float) -> float:
        """Seconds of the optimizer's update of `parameters` elements."""
        return self._traffic(_OPTIMIZER_BYTES * parameters)

    def operations(self) -> float:
        """Operations of the model per micro-batch, all processes together: forward and backward, nothing repeated."""
        model = self.model
        attention = 2 * model.sequence_length * model.attention_width
        matrices = 2 * sum(model.block_numbers(experts=model.has_experts(index)) for index in range(model.layers))
        blocks = matrices + model.layers * attention
        return 3.0 * self.tokens * (blocks + 2 * model.width * model.vocabulary_size)

    def _hidden(self, attention: float) -> tuple[float, float]:
        """Hidden seconds of the collectives of a block, forward and backward."""
        model, found = self.model, [self._hidden_attention(attention)]
        if self.inside.layout in ("2d", "2.5d"):
            found += [self._hidden_product(model.width, model.qkv_features, inward=True)]
            found += [self._hidden_product(model.attention_width, model.width, inward=False)]
            found += [self._hidden_product(model.width, model.mlp_width, inward=True)] * (2 if model.gated else 1)
            found += [self._hidden_product(model.mlp_width, model.width, inward=False)]
        return sum(each[0] for each in found), sum(each[1] for each in found)

    def _hidden_attention(self, attention: float) -> tuple[float, float]:
        inside, sizes = self.inside, self.model.layer_sizes(self.samples, self.element)
        hops, kind = inside.context, inside.context_kind
        if hops == 1 or kind == "ulysses":
            return 0.0, 0.0
        traffic, _ = inside.traffic(sizes).attention()
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
        product = self._product(inputs * outputs)
        back = (products_hidden(shape.side, product, each) for each in (x, weight))
        return products_hidden(shape.side, product, x + weight), sum(back)

    def _seconds_of(self, table: Table, axis: str, collective: str) -> float:
        key = axis, collective
        return table_seconds({key: table[key]} if key in table else {}, self.inside.axes, self.links)

    def _rows(self, experts: bool) -> Rows | None:
        """Assignments of the busiest process that pass experts of others."""
        sizes, inside = self.model.experts, self.inside
        if not experts or sizes is None:
            return None
        return balanced_rows(sizes, self.tokens // inside.context, inside.expert, self.imbalance)

    def _matrix_numbers(self, *, experts: bool) -> float:
        """Numbers in the matrices of a block; key heads that several processes have count for each."""
        model, cut = self.model, self.inside.head_parts
        keys = 2 * (cut * self.inside.key_heads(model.key_heads) - model.key_heads) if cut > model.key_heads else 0
        uneven = 0.0
        if experts and model.experts is not None:  # the busiest process
            uneven = (self.imbalance - 1) * model.experts.top_k * model.experts.matrix_numbers(model.width)
        return model.block_numbers(experts=experts) + model.width * keys * model.head_width + uneven

    def _product(self, numbers: float) -> float:
        return self._arithmetic(2 * self.tokens * numbers)

    def _attention(self) -> float:
        """Of the process that computes most."""
        n, kind = self.inside.context, self.inside.context_kind
        operations = 2 * self.tokens * self.model.sequence_length * self.model.attention_width
        factor = {"ring-plain": (2 * n - 1) / n, "ring-self-attention": 2.0}.get(kind, 1.0) if n > 1 else 1.0
        return self._arithmetic(operations * factor)

    def _arithmetic(self, operations: float) -> float:
        rate = self.cluster.efficiency * self.cluster.device.operations_per_second
        return operations / self.inside.processes / rate

    def _elementwise(self, *, experts: bool) -> float:
        model, inside = self.model, self.inside
        stream = _PASSES_STREAM * model.width
        if inside.grid is None and not inside.sequence:
            stream *= inside.tensor  # every process has all of it
        shared: float = (_PASSES_GATED if model.gated else _PASSES_MLP) * model.mlp_width
        if experts and model.experts is not None:
            of = model.experts
            shared = (_PASSES_GATED if of.gated else _PASSES_MLP) * of.expert_width
            shared *= of.shared + self.imbalance * of.top_k
            stream += _PASSES_ROW * of.top_k * model.width * (1 if inside.sequence else inside.tensor)
        shared += _PASSES_QKV * model.qkv_features
        return self._traffic(self.element * self.tokens * (stream + shared) / inside.processes)

    def _traffic(self, num_bytes: float) -> float:
        return num_bytes / (self.cluster.efficiency * self.cluster.device.memory_bytes_per_second)
