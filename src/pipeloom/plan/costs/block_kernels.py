"""The kernels of one block of a transformer on one of the processes that share a stage. No torch here.

    matrices      F, I and W: one product each of [tokens, inputs], [inputs, outputs] or their transposes. W adds the
                  gradient to that of earlier micro-batches
    attention     fused: one kernel in F and one in I, of unmasked scores. Unfused (arXiv:2205.05198, figure 3): two
                  products in F and four in I, of all scores, which softmax and dropout read and write
    elementwise   norms, additions to the residual stream, activation functions, orders of heads: memory traffic

The tables below have reads and writes of one tensor, in numbers; masks of dropout count by their bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.architecture import Architecture
from pipeloom.plan.costs.kernel_times import KernelTimes
from pipeloom.plan.costs.software import Software


class Passes(NamedTuple):
    """Reads and writes of a tensor in F and in I."""

    forward: float
    backward: float


_STREAM = Passes(10, 12)  # of [tokens, width]: two norms (2; 3), two additions (3; 3)
_MLP, _GATED = Passes(2, 3), Passes(3, 5)  # of [tokens, mlp_width]: GELU; SiLU times the other half
_ROW = Passes(5, 10)  # of [assignments, width]: in the order of experts (2), and weighted into the residual stream (3)
_QKV = Passes(4, 2)  # of queries, keys and values: biases or rotary positions, and copies in the order of heads
_OUTPUT = Passes(2, 2)  # of attention's output, unfused: a copy in the order of features
_SOFTMAX = Passes(2, 3)  # of [heads, tokens, keys]
_DROPOUT = Passes(2, 2)  # of a tensor, beside its mask of one byte; behind attention and MLP fused with the addition
_ADD_GRADIENT = 3  # of a weight: read its gradient and the sum, write the sum
_KERNELS = Passes(30, 34)  # of a block as PyTorch runs it: copies, fills and sums of biases too


class Product(NamedTuple):
    """Products of matrices, [rows, inputs] by [inputs, outputs].

    Attributes:
        rows, inputs, outputs: sizes.
        together: equal products in one kernel.
        turns: kernels that follow each other.
    """

    rows: float
    inputs: float
    outputs: float
    together: int = 1
    turns: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKernels:
    """Seconds of a block's kernels for one micro-batch.

    Attributes:
        model: the sizes.
        inside: the processes that share a stage.
        samples: per micro-batch, all processes together.
        kernels: of the device.
        software: what it runs.
        imbalance: load of the busiest expert-parallel process over the mean load; the times are that process's.
        slices: per micro-batch, one after the other.
    """

    model: Architecture
    inside: InsideStage
    samples: int
    kernels: KernelTimes
    software: Software
    imbalance: float = 1.0
    slices: int = 1

    @property
    def _tokens(self) -> float:
        """Tokens per slice and process, in layers that processes share."""
        parts = self.inside.context * self.inside.sample_parts * self.slices
        return self.samples * self.model.sequence_length / parts

    @property
    def _rows(self) -> float:
        """Rows per slice through the experts of the busiest process; tensor-parallel ranks have all rows."""
        of, tokens = self.model.experts, round(self._tokens)
        if of is None:
            return 0.0
        samples = max(1, round(self.samples / self.inside.sample_parts))
        if self.inside.expert > 1 and self.inside.exchange == "capacity":  # experts compute the padding too
            return of.experts * of.capacity(samples, tokens)
        return self.imbalance * of.assignments(samples, tokens)

    @property
    def _dropout(self) -> bool:
        return max(self.model.dropout, self.software.dropout) > 0

    def products(self, *, experts: bool) -> list[Product]:
        """The products of the matrices in F, with experts or without."""
        return list(self._products(experts=experts))

    def matrices(self, products: Sequence[Product]) -> tuple[float, float, float]:
        """Forward, input gradients and weight gradients of all matrices."""
        forward = inputs = weights = numbers = 0.0
        product = self.kernels.product
        for rows, wide, high, count, turns in products:
            forward += turns * product(rows, high, wide, count)
            inputs += turns * product(rows, wide, high, count)
            weights += turns * product(wide, high, rows, count)
            numbers += wide * high * count * (turns if self.inside.grid is None else 1)
        weights += self._sum_gradients(numbers, len(products))
        return tuple(self.slices * each for each in (forward, inputs, weights))  # type: ignore[return-value]

    def attention(self) -> tuple[float, float]:
        """Forward and backward of attention between its matrices, of the process that computes most."""
        if not self.software.fused_attention:
            return self._unfused_attention()
        model, inside, n = self.model, self.inside, self.inside.context
        factor = {"ring-plain": (2 * n - 1) / n, "ring-self-attention": 2.0}.get(inside.context_kind, 1.0)
        width = model.attention_width / inside.head_parts
        operations = 2 * self._tokens * model.sequence_length * width * (factor if n > 1 else 1.0)
        blocks = self._tokens * model.heads / inside.head_parts
        fused = self.kernels.fused_attention
        return tuple(self.slices * fused(operations, blocks, backward=back) for back in (False, True))  # type: ignore[return-value]

    def elementwise(self, *, experts: bool) -> tuple[float, float]:
        """Forward and backward of what is computed per element."""
        model, inside = self.model, self.inside
        tokens = self._tokens
        around = tokens / (inside.tensor if inside.sequence else 1)  # of the residual stream
        width = model.width / (1 if inside.grid is None else inside.grid.side)
        inner, activation = model.mlp_width / inside.head_parts, _GATED if model.gated else _MLP
        loads = [(_STREAM, around * width)]
        if experts and model.experts is not None:
            of = model.experts
            activation = _GATED if of.gated else _MLP
            inner = of.expert_width / inside.head_parts * of.shared
            loads += [(_ROW, self._rows * width), (activation, self._rows * of.expert_width / inside.head_parts)]
        heads = model.heads / inside.head_parts
        features = (heads + 2 * inside.key_heads(model.key_heads)) * model.head_width
        loads += [(activation, tokens * inner), (_QKV, tokens * features)]
        if not self.software.fused_attention:
            loads.append((_OUTPUT, tokens * heads * model.head_width))
        masks = 2 * around * width if self._dropout else 0.0  # read and written together with the additions
        found = []
        for direction, kernels in enumerate(_KERNELS):
            numbers = sum(passes[direction] * size for passes, size in loads)
            numbers += masks * (_DROPOUT[direction] if direction else 0)
            bytes_moved = self.kernels.element * numbers + masks
            found.append(self.slices * self.kernels.elementwise(bytes_moved, kernels))
        return found[0], found[1]

    def launches(self, products: Sequence[Product]) -> tuple[float, float, float]:
        """Kernels in F, I and W."""
        number = sum(product.turns for product in products)
        forward, backward = (1, 1) if self.software.fused_attention else (4, 6)
        sums = 0 if self.software.fused_gradients else number
        return _KERNELS[0] + number + forward, _KERNELS[1] + number + backward, number + sums

    def _sum_gradients(self, numbers: float, kernels: int) -> float:
        """Adding gradients of weights to those of earlier micro-batches."""
        if self.software.fused_gradients or self.kernels.cluster.device.multiprocessors is None:
            return 0.0
        return self.kernels.elementwise(_ADD_GRADIENT * self.kernels.element * numbers, kernels)

    def _products(self, *, experts: bool) -> Iterator[Product]:
        model, inside = self.model, self.inside
        heads = model.heads / inside.head_parts + 2 * inside.key_heads(model.key_heads)
        yield self._column(model.width, heads * model.head_width)
        yield self._row(model.attention_width, model.width)
        if not experts or model.experts is None:
            for _ in range(2 if model.gated else 1):
                yield self._column(model.width, model.mlp_width / inside.head_parts)
            yield self._row(model.mlp_width, model.width)
            return
        of, cut = model.experts, inside.head_parts
        yield Product(self._tokens, model.width, of.router_matrices * of.experts)
        here = of.experts // inside.expert
        routed, shared = (of.expert_width, here, self._rows / here), (of.shared * of.expert_width, 1, self._tokens)
        for width, count, each in (routed, shared):
            if width:
                for _ in range(2 if of.gated else 1):
                    yield Product(each, model.width, width / cut, count)
                yield Product(each, width / cut, model.width, count)

    def _column(self, inputs: float, outputs: float) -> Product:
        """A layer whose `outputs` are those of one process already."""
        return self._shared(inputs, outputs, inward=True)

    def _row(self, inputs: float, outputs: float) -> Product:
        return self._shared(inputs / self.inside.head_parts, outputs, inward=False)

    def _shared(self, inputs: float, outputs: float, *, inward: bool) -> Product:
        grid, tokens = self.inside.grid, self._tokens
        if grid is None:
            return Product(tokens, inputs, outputs)
        if inward:
            inputs /= grid.side
        else:
            outputs /= grid.side
        if grid.layout == "3d":  # tokens of a row of the cube are gathered
            return Product(tokens * grid.side, inputs, outputs)
        return Product(tokens, inputs, outputs, turns=grid.side)

    def _unfused_attention(self) -> tuple[float, float]:
        model, inside = self.model, self.inside
        queries = model.sequence_length / inside.context / self.slices
        keys, width = model.sequence_length, model.head_width
        many = max(1, round(self.samples / inside.sample_parts * model.heads / inside.head_parts))
        element, product = self.kernels.element, self.kernels.product
        scores = many * queries * keys
        twice = product(queries, keys, width, many)  # scores, and their gradients
        forward = twice + product(queries, width, keys, many)
        backward = twice + product(queries, width, keys, many) + 2 * product(keys, width, queries, many)
        masks = scores if self._dropout else 0.0
        moved = [element * scores * (_SOFTMAX[way] + (_DROPOUT[way] if self._dropout else 0)) + masks for way in (0, 1)]
        forward += self.kernels.elementwise(moved[0], 2)
        backward += self.kernels.elementwise(moved[1], 2)
        return self.slices * forward, self.slices * backward
