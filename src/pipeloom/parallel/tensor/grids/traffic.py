"""Bytes that a process of a grid sends for one micro-batch, by axis and collective: what `AxisMeter` counts. No torch.

    matrix product of X [T, I] and W [O, I], in elements (of one of the d layers of 2.5d: T/d for T)

             forward                                    backward
    2d       X  T I / q     along tp_column             X  2 T I / q                         along tp_column
             W  I O / q     along tp_row                W  2 I O / q                         along tp_row
    3d       X  (l-1) T I / l^3   along the input axis  X  2 (l-1) T I / l^3                 along the input axis
             W  (l-1) I O / l^3   along tp_i            W  2 (l-1) I O / l^3                 along tp_i
             Y  (l-1) T O / l^3   along the output axis Y  (l-1) T O / l^3                   along the output axis

2d broadcasts q blocks, and reduces as many in the backward; 3d gathers, and scatters sums. For comparison, a pair of
layers in 1D sends 2 (t-1)/t T I forward and as many backward. The sums of gradients over ``Placed.sum_over``, once per
step, are not counted here.
"""

from pipeloom.parallel.placed import Place
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.parallel.traffic import LayerSizes, Table, Traffic, sends, together, total


class GridTraffic:
    """Traffic of the layers of a stage.

    Args:
        sizes: of the layers. The sequence length is that of this process's part, if a sequence is shared along cp.
        shape: of the grid.
        place: of the process; None: of one that is not on the diagonal of the grid, which sends most.
    """

    def __init__(self, sizes: LayerSizes, shape: GridShape, place: Place | None = None) -> None:
        self.sizes, self.shape, self.place = sizes, shape, place

    def linear(self, inputs: int, outputs: int, *, inward: bool) -> Traffic:
        """A linear layer; `inward`: it takes activations from `GridShape.outer` to `GridShape.inner`."""
        return linear_traffic(self.shape, self.sizes.tokens, inputs, outputs, self.sizes.element, inward=inward)

    def embedding(self) -> Traffic:
        """The embedding of tokens. In 2D a process on the diagonal of the grid keeps one of its pieces."""
        shape, side = self.shape, self.shape.side
        piece = _block(shape, self.sizes.tokens, self.sizes.width) * self.sizes.element
        if shape.layout == "3d":
            there = total(
                [sends("tp_i", "all_to_all", side, side * piece), sends("tp_j", "reduce_scatter", side, side * piece)]
            )
            back = total([sends("tp_i", "all_to_all", side, side * piece), sends("tp_j", "all_gather", side, piece)])
            return Traffic(there, back)
        at = None if self.place is None else self.place.coordinates
        keeps = at is not None and at["tp_row"] == at["tp_column"]
        # An all-to-all with pieces for `side` members alone: all that are not kept are sent.
        exchange: Table = sends("tp_row+tp_column", "pieces", side, (side - keeps) * piece)
        sent = {(axis, "all_to_all"): each for (axis, _), each in exchange.items()}
        return Traffic(sent, sent)

    def block(self, attention: Traffic, repeated: Table, *, full: bool) -> Traffic:
        """A block.

        Args:
            attention: of attention between processes that share sequences.
            repeated: what a recomputation of attention sends; empty if it is not recomputed.
            full: whether the block is recomputed as a whole.
        """
        sizes, norm = self.sizes, self.norm()
        width, mlp = sizes.width, sizes.mlp_width
        parts = [
            norm,
            self.linear(width, sizes.qkv_features, inward=True),
            attention,
            self.linear(sizes.heads * sizes.head_width, width, inward=False),
            norm,
            *[self.linear(width, mlp, inward=True)] * (2 if sizes.gated else 1),
            self.linear(mlp, width, inward=False),
        ]
        found = together(parts)
        return Traffic(found.forward, total([found.backward, found.forward if full else repeated]))

    def norm(self) -> Traffic:
        """A layer norm, or an RMS norm."""
        shape, axis = self.shape, self.shape.outer.width
        numbers, sums = self.sizes.tokens // shape.batch_blocks * self.sizes.wide, 2 if self.sizes.centered else 1
        return Traffic(
            sends(axis, "all_reduce", shape.side, numbers, sums), sends(axis, "all_reduce", shape.side, sums * numbers)
        )

    def head(self) -> Traffic:
        """The last layer, and the loss: three numbers per token along the vocabulary, and the sum over the batch."""
        shape, wide = self.shape, self.sizes.wide
        padded = -(-self.sizes.vocabulary_size // shape.side) * shape.side
        last = self.linear(self.sizes.width, padded, inward=True)
        numbers = self.sizes.tokens // shape.batch_blocks * wide
        losses = [
            *(sends(shape.inner.width, "all_reduce", shape.side, count * numbers) for count in (1, 2)),
            sends("+".join(shape.inner.batch), "all_reduce", shape.batch_blocks, wide),
        ]
        return Traffic(total([last.forward, *losses]), last.backward)


def linear_traffic(shape: GridShape, tokens: int, inputs: int, outputs: int, element: int, *, inward: bool) -> Traffic:
    """A linear layer.

    Args:
        tokens: of the micro-batch, all processes together.
        inputs, outputs: features.
        element: bytes per element.
        inward: whether it takes activations from `GridShape.outer` to `GridShape.inner`.
    """
    source, target = (shape.outer, shape.inner) if inward else (shape.inner, shape.outer)
    side = shape.side
    x, y = (_block(shape, tokens, features) * element for features in (inputs, outputs))
    weight = outputs // side * (inputs // shape.input_blocks) * element
    if shape.layout == "3d":
        gathered = [sends(target.width, "all_gather", side, x), sends("tp_i", "all_gather", side, weight)]
        forward = total([*gathered, sends(source.width, "reduce_scatter", side, side * y)])
        sums = [
            sends(target.width, "reduce_scatter", side, side * x),
            sends("tp_i", "reduce_scatter", side, side * weight),
        ]
        return Traffic(forward, total([sends(source.width, "all_gather", side, y), *gathered, *sums]))
    blocks = [sends("tp_column", "broadcast", side, x, side), sends("tp_row", "broadcast", side, weight, side)]
    sums = [sends("tp_column", "reduce", side, x, side), sends("tp_row", "reduce", side, weight, side)]
    return Traffic(total(blocks), total([*blocks, *sums]))


def _block(shape: GridShape, tokens: int, features: int) -> int:
    """Elements of activations per process."""
    return tokens // shape.batch_blocks * (features // shape.side)
