"""Times of a transformer on a cluster, by arithmetic: slices of a stage, and the end of a step.

The time of a slice is its kernels' time, one launch per kernel, and its message. A matrix product takes as long as its
arithmetic or its memory traffic, whichever is longer; every other operation takes as long as its memory traffic. Values
have two bytes.

The layers are GPT-3's as PyTorch runs them without fused kernels: matrices of 12 width**2 values, heads that keep
their scores, dropout, tensor parallelism as in Megatron-LM (arXiv:1909.08053): two all-reduces per layer and direction.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster
from pipeloom.plan.costs.links import data_links
from pipeloom.plan.slicing.slice_costs import Array

_VALUE_BYTES = 2
_TILE = 128  # rows of a product per tile; fewer rows take as long
# Reads and writes of a tensor outside matrix products, per forward; a backward has twice as many.
_PASSES_WIDTH = 18  # of [tokens, width]: two norms (2 each), two dropouts with bias and residual (7 each)
_PASSES_SHARD = 30  # of [tokens, width / tensor]: bias and GELU of 4 width (4 x 4), bias and transposes of heads (14)
_PASSES_SCORES = 7  # of [heads, tokens, keys]: scale and mask (3), softmax (2), dropout (2)
_PASSES_ACCUMULATE = 3  # of a weight's gradient: read both, write the sum
_PASSES_CONTEXT = 6  # of keys and values of the context, backward only: gradients of slices are added to theirs
_KERNELS = 24  # of a layer's forward; its backward has twice as many
_OPTIMIZER_BYTES = 40  # Adam, per parameter: master, two moments (read and write, 24), gradient, both number formats


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage of a transformer on a slice: a `SliceTime`.

    Attributes:
        cluster: the cluster it runs on.
        layers: layers per stage.
        width: width of the residual stream.
        heads: attention heads per layer.
        tensor: tensor-parallel degree, inside a node.
        message: destination of the output: "node" for the same node, "network" for another node.
        streams: messages that share the network of a node at the same time.
        recompute: full activation recomputation.
    """

    takes_arrays: ClassVar[bool] = True
    cluster: Cluster
    layers: int
    width: int
    heads: int
    tensor: int = 1
    message: str = "network"
    streams: int = 1
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.tensor or self.tensor > self.cluster.devices_per_node:
            raise InputError(
                f"tensor={self.tensor}: must divide the {self.heads} heads and be at most the "
                f"{self.cluster.devices_per_node} devices per node. Use fewer."
            )

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Array, Array]:
        length, context = np.asarray(length, dtype=np.float64), np.asarray(context, dtype=np.float64)
        tokens, keys, share = batch * length, context + length, self.width / self.tensor
        products = self._products(tokens, weights=False)
        # Scores and their product with the values: two products of every head of this device.
        scores = tokens * keys * self.heads / self.tensor
        attention = 2 * self._product(tokens * keys * share, scores + batch * (length + keys) * share)
        passes = _PASSES_WIDTH * tokens * self.width + _PASSES_SHARD * tokens * share + _PASSES_SCORES * scores
        elementwise = self._traffic(passes)
        inside = self.cluster.inside_node  # a ring over the devices that share a layer
        part = _VALUE_BYTES * tokens * share / (self.cluster.efficiency * inside.bytes_per_second)
        reduces = 4 * (self.tensor - 1) * (part + inside.latency_seconds)
        behind = self._traffic(np.where(context > 0, _PASSES_CONTEXT * 2 * batch * keys * share, 0.0))
        backward = products + self._products(tokens, weights=True) + 2 * (attention + elementwise) + behind + reduces
        launch = self.layers * _KERNELS * self.cluster.device.launch_seconds
        forward = self.layers * (products + attention + elementwise + reduces) + launch
        backward = self.layers * backward + 2 * launch
        if self.recompute:
            backward = backward + forward
        message = self._message(tokens)
        return forward + message, backward + message

    def _products(self, tokens: Array, *, weights: bool) -> Array:
        """The four matrices of a layer on `tokens` rows, or (`weights`) the gradients of the four."""
        t = self.tensor
        total = np.zeros_like(tokens)
        # Values over width**2 / t, and columns in and out over width: heads' inputs, heads' output, MLP up, MLP down.
        for size, across in ((3, 1 + 3 / t), (1, 1 / t + 1), (4, 1 + 4 / t), (4, 4 / t + 1)):
            values, columns = size * self.width**2 / t, across * self.width
            rows = tokens if weights else np.ceil(tokens / _TILE) * _TILE
            total = total + self._product(rows * values, values + tokens * columns)
            if weights:
                total = total + self._traffic(_PASSES_ACCUMULATE * values)
        return total

    def _product(self, operations: Array, values: Array) -> Array:
        """`operations` are pairs of a multiplication and an addition, `values` what is read and written."""
        rate = self.cluster.efficiency * self.cluster.device.operations_per_second
        return np.maximum(2 * operations / rate, self._traffic(values))

    def _traffic(self, values: Any) -> Array:
        rate = self.cluster.efficiency * self.cluster.device.memory_bytes_per_second
        return np.asarray(_VALUE_BYTES * values / rate)

    def _message(self, tokens: Array) -> Array:
        """The output, sent from one device to one, which sends it on to its tensor-parallel group."""
        inside, outside = self.cluster.inside_node, self.cluster.between_nodes
        count = _VALUE_BYTES * tokens * self.width / self.cluster.efficiency
        if self.message == "node":
            seconds = inside.latency_seconds + count / inside.pair_bytes_per_second
        else:
            seconds = outside.latency_seconds + count * self.streams / outside.bytes_per_second
        passed_on = count / inside.bytes_per_second + (self.tensor - 1) * inside.latency_seconds
        return np.asarray(seconds + passed_on * (self.tensor > 1))


def pipeline_stages(
    cluster: Cluster, *, layers: int, width: int, heads: int, pipeline: int, tensor: int = 1, recompute: bool = False
) -> list[StageTime]:
    """The stages of a pipeline, packed into nodes; the last stage of each node sends over the network.

    Raises:
        InputError: `pipeline` does not divide `layers`.
    """
    if layers % pipeline:
        raise InputError(f"pipeline={pipeline}: must divide the {layers} layers. Use a divisor.")
    per_node = max(1, cluster.devices_per_node // tensor)
    far = StageTime(
        cluster=cluster, layers=layers // pipeline, width=width, heads=heads, tensor=tensor, recompute=recompute
    )
    near = replace(far, message="node")
    return [far if stage % per_node == per_node - 1 else near for stage in range(pipeline)]


def step_end_seconds(
    cluster: Cluster, *, layers: int, width: int, pipeline: int, tensor: int = 1, data: int = 1
) -> float:
    """Seconds after the last backward: the ring all-reduce of gradients over `data` replicas, then Adam.

    The first stage begins last and decides; `data_links` says which links the ring uses.
    """
    parameters = 12 * width**2 * layers / pipeline / tensor
    count = 2 * (data - 1) / data * _VALUE_BYTES * parameters
    links = data_links(cluster, stride=pipeline * tensor, replicas=data)
    seconds: float = count / links["data_sum_bytes_per_second"]
    update = _OPTIMIZER_BYTES * parameters / cluster.device.memory_bytes_per_second
    return seconds + update / cluster.efficiency
