"""What a transformer takes on a cluster, from arithmetic: slices of a stage, and what ends a step.

A phase of a slice takes what its device takes, or what its host takes to start the kernels, whichever is longer; then
its message. A matrix product takes as long as its arithmetic or its memory traffic, whichever is longer; everything
else takes its memory traffic. Values have two bytes.

The layers are GPT-3's as PyTorch runs them without fused kernels: matrices of 12 width**2 values, heads that keep
their scores, dropout, tensor parallelism as in Megatron-LM (arXiv:1909.08053): two all-reduces a layer and direction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeloom.errors import InputError
from pipeloom.plan.cluster import Cluster, links_beside
from pipeloom.plan.slicing.slice_costs import Array

_VALUE_BYTES = 2
_TILE = 128  # rows of a product that a processor of the device takes at once: fewer take as long
# Reads and writes of a whole tensor by what is not a matrix product, in the forward; the backward has twice as many.
_PASSES_WIDTH = 18  # of [tokens, width]: two norms (2 each), two dropouts with bias and residual (7 each)
_PASSES_SHARD = 30  # of [tokens, width / tensor]: bias and GELU of 4 width (4 x 4), bias and transposes of heads (14)
_PASSES_SCORES = 7  # of [heads, tokens, keys]: scale and mask (3), softmax (2), dropout (2)
_PASSES_ACCUMULATE = 3  # of a weight's gradient: read both, write the sum
_PASSES_CONTEXT = 6  # of keys and values of the context, backward alone: gradients of slices are added to theirs
_KERNELS = 24  # of a layer's forward; its backward has twice as many
_OPTIMIZER_BYTES = 40  # Adam, a parameter: master, two moments (read and write, 24), gradient and copies of both types


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """Seconds of one stage of a transformer on a slice: a `SliceTime`.

    Attributes:
        cluster: what it runs on.
        layers: of the stage.
        width: of the residual stream.
        heads: attention heads of a layer.
        tensor: devices that share every layer, inside a node.
        message: where its output goes: "node" to a device of its node, "network" to another node.
        streams: messages that share the network of a node at once.
        recompute: the backward runs the forward again.
    """

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
                f"{self.tensor} devices share {self.heads} heads in nodes of {self.cluster.devices_per_node}: they "
                "divide the heads and live in one node; use fewer"
            )

    @property
    def takes_arrays(self) -> bool:
        return True

    def __call__(self, batch: int, length: Any, context: Any) -> tuple[Array, Array]:
        length, context = np.asarray(length, dtype=np.float64), np.asarray(context, dtype=np.float64)
        launch = self.layers * _KERNELS * self.cluster.device.launch_seconds
        forward = self.layers * self._forward(batch, length, context) + launch
        backward = self.layers * self._backward(batch, length, context) + 2 * launch
        if self.recompute:
            backward = backward + forward
        message = self._message(batch * length)
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

    def _attention(self, batch: int, length: Array, context: Array) -> Array:
        """Scores and their product with the values: two products of every head of this device."""
        keys, share = context + length, self.width / self.tensor
        operations = batch * length * keys * share
        values = batch * (length * keys * self.heads / self.tensor + (length + keys) * share)
        return 2 * self._product(operations, values)

    def _elementwise(self, batch: int, length: Array, context: Array) -> Array:
        tokens = batch * length
        scores = tokens * (context + length) * self.heads / self.tensor
        width = tokens * self.width
        return self._traffic(_PASSES_WIDTH * width + _PASSES_SHARD * width / self.tensor + _PASSES_SCORES * scores)

    def _forward(self, batch: int, length: Array, context: Array) -> Array:
        tokens = batch * length
        return (
            self._products(tokens, weights=False)
            + self._attention(batch, length, context)
            + self._elementwise(batch, length, context)
            + 2 * self._all_reduce(tokens)
        )

    def _backward(self, batch: int, length: Array, context: Array) -> Array:
        tokens = batch * length
        behind = np.where(context > 0, _PASSES_CONTEXT * 2 * batch * (context + length) * self.width / self.tensor, 0.0)
        return (
            self._products(tokens, weights=False)
            + self._products(tokens, weights=True)
            + 2 * self._attention(batch, length, context)
            + 2 * self._elementwise(batch, length, context)
            + self._traffic(behind)
            + 2 * self._all_reduce(tokens)
        )

    def _product(self, operations: Array, values: Array) -> Array:
        """`operations` are pairs of a multiplication and an addition, `values` what is read and written."""
        rate = self.cluster.efficiency * self.cluster.device.operations_per_second
        return np.maximum(2 * operations / rate, self._traffic(values))

    def _traffic(self, values: Any) -> Array:
        rate = self.cluster.efficiency * self.cluster.device.memory_bytes_per_second
        return np.asarray(_VALUE_BYTES * values / rate)

    def _all_reduce(self, tokens: Array) -> Array:
        """A ring over the devices that share the layer."""
        links, n = self.cluster.inside_node, self.tensor
        rate = self.cluster.efficiency * links.bytes_per_second
        part = _VALUE_BYTES * tokens * self.width / n / rate
        return np.asarray(2 * (n - 1) * (part + links.latency_seconds))

    def _message(self, tokens: Array) -> Array:
        """The output, sent once, from one device to one; which passes it on to those that share the next layer."""
        inside, outside = self.cluster.inside_node, self.cluster.between_nodes
        count = _VALUE_BYTES * tokens * self.width / self.cluster.efficiency
        if self.message == "node":
            seconds = inside.latency_seconds + count / inside.pair_bytes_per_second
        else:
            seconds = outside.latency_seconds + count * self.streams / outside.bytes_per_second
        passed_on = count / inside.bytes_per_second + (self.tensor - 1) * inside.latency_seconds
        return np.asarray(seconds + passed_on * (self.tensor > 1))


def pipeline_stages(
    cluster: Cluster,
    *,
    layers: int,
    width: int,
    heads: int,
    pipeline: int,
    tensor: int = 1,
    recompute: bool = False,
) -> list[StageTime]:
    """The stages of a pipeline; neighbours live in the same node where they fit into it.

    The last stage of a node sends over the network; where a whole pipeline fits into half a node, as many as fit share
    the network.

    Raises:
        InputError: stages of unequal size.
    """
    if layers % pipeline:
        raise InputError(f"{layers} layers in {pipeline} stages: the stages are equal; use a number that divides them")
    per_node = max(1, cluster.devices_per_node // tensor)
    common = {
        "cluster": cluster,
        "layers": layers // pipeline,
        "width": width,
        "heads": heads,
        "tensor": tensor,
        "recompute": recompute,
    }
    near, far = (StageTime(**common, message=where) for where in ("node", "network"))  # type: ignore[arg-type]
    return [far if stage % per_node == per_node - 1 else near for stage in range(pipeline)]


def step_end_seconds(
    cluster: Cluster, *, layers: int, width: int, pipeline: int, tensor: int = 1, data: int = 1
) -> float:
    """What follows the pipeline: the sum of the gradients over `data` replicas, and Adam.

    A ring over the replicas of each stage. The replicas of a stage live in different nodes unless several pipelines fit
    into one; all devices of a node then share its network. The first stage is the last to begin: what others do before
    does not count.
    """
    parameters = 12 * width**2 * layers / pipeline / tensor
    count = 2 * (data - 1) / data * _VALUE_BYTES * parameters
    links = links_beside(cluster, devices=pipeline * tensor, copies=data)
    seconds: float = count / links["data_sum_bytes_per_second"]
    update = _OPTIMIZER_BYTES * parameters / cluster.device.memory_bytes_per_second
    return seconds + update / cluster.efficiency
