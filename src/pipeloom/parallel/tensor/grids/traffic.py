"""Bytes that a process of a grid sends for one micro-batch, by axis: what `AxisMeter` counts. No torch here.

    matrix product of X [T, I] and W [O, I], in elements (of one of the d layers of 2.5d: T/d for T)

             forward                                    backward
    2d       X  T I / q     along tp_column             X  2 T I / q                         along tp_column
             W  I O / q     along tp_row                W  2 I O / q                         along tp_row
    3d       X  (l-1) T I / l^3   along the input axis  X  2 (l-1) T I / l^3                 along the input axis
             W  (l-1) I O / l^3   along tp_i            W  2 (l-1) I O / l^3                 along tp_i
             Y  (l-1) T O / l^3   along the output axis Y  (l-1) T O / l^3                   along the output axis

For comparison, a pair of layers in 1D sends 2 (t-1)/t T I forward and as many backward. The sums of gradients over
``Placed.sum_over``, once per step, are not counted here.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.parallel.placed import Place
from pipeloom.parallel.tensor.grids.shape import GridShape


class AxisBytes(NamedTuple):
    """Bytes by axis, as `Mesh.axis` names it."""

    forward: Counter[str]
    backward: Counter[str]

    def times(self, number: int) -> "AxisBytes":
        """Of `number` equal layers or micro-batches."""
        return AxisBytes(*(Counter({axis: number * size for axis, size in part.items()}) for part in self))


def together(parts: Sequence[AxisBytes]) -> AxisBytes:
    """The sum over layers."""
    found = AxisBytes(Counter(), Counter())
    for part in parts:
        found.forward.update(part.forward)
        found.backward.update(part.backward)
    return found


def linear_bytes(shape: GridShape, tokens: int, inputs: int, outputs: int, element: int, *, inward: bool) -> AxisBytes:
    """A linear layer.

    Args:
        tokens: of the micro-batch, all processes together.
        inputs, outputs: features.
        element: bytes per element.
        inward: whether it takes activations from `GridShape.outer` to `GridShape.inner`.
    """
    source, target = (shape.outer, shape.inner) if inward else (shape.inner, shape.outer)
    x, y = (_block(shape, tokens, features) * element for features in (inputs, outputs))
    weight = outputs // shape.side * (inputs // shape.input_blocks) * element
    if shape.layout == "3d":
        peers = shape.side - 1
        sizes = {target.width: x, "tp_i": weight, source.width: y}
        again = {target.width: 2 * x, "tp_i": 2 * weight, source.width: y}
        return AxisBytes(
            Counter({axis: peers * size for axis, size in sizes.items()}),
            Counter({axis: peers * size for axis, size in again.items()}),
        )
    forward = Counter({"tp_column": shape.side * x, "tp_row": shape.side * weight})
    return AxisBytes(forward, Counter({axis: 2 * size for axis, size in forward.items()}))


def norm_bytes(shape: GridShape, tokens: int, element: int, *, centered: bool = True) -> AxisBytes:
    """A layer norm, or with `centered` False an RMS norm; `element` of its sums: at least 4."""
    axis, sums = shape.outer.width, 2 if centered else 1
    one = _all_reduce(tokens // shape.batch_blocks * element, shape.side)
    both = _all_reduce(tokens // shape.batch_blocks * element * sums, shape.side)
    return AxisBytes(Counter({axis: sums * one}), Counter({axis: both}))


def embedding_bytes(shape: GridShape, tokens: int, width: int, element: int, place: Place) -> AxisBytes:
    """The embedding of tokens. In 2D a process on the diagonal of the grid keeps one of its pieces."""
    piece = _block(shape, tokens, width) * element
    if shape.layout == "3d":
        peers = shape.side - 1
        sent = Counter({"tp_i": peers * piece, "tp_j": peers * piece})
        return AxisBytes(sent, sent.copy())
    keeps = place.coordinates["tp_row"] == place.coordinates["tp_column"]
    sent = Counter({"tp_row+tp_column": (shape.side - keeps) * piece})
    return AxisBytes(sent, sent.copy())


def loss_bytes(shape: GridShape, tokens: int, element: int) -> AxisBytes:
    """Cross-entropy: three numbers per token along the vocabulary, and the sum over the batch; `element` at least 4."""
    own = tokens // shape.batch_blocks * element
    along = _all_reduce(own, shape.side) + _all_reduce(2 * own, shape.side)
    batch = Counter({"+".join(shape.inner.batch): _all_reduce(element, shape.batch_blocks)})
    return AxisBytes(Counter({shape.inner.width: along}) + batch, Counter())


def gpt_bytes(
    shape: GridShape,
    *,
    tokens: int,
    width: int,
    qkv_features: int,
    mlp_features: int,
    layers: int,
    vocabulary_size: int,
    element: int,
    place: Place,
) -> AxisBytes:
    """A GPT of `pipeloom.models`, with its loss, one micro-batch.

    Args:
        tokens: of the micro-batch, all processes together.
        qkv_features: rows of `qkv`: 3 * width, with fewer key heads less.
        element: bytes per element; sums of norms and loss have at least 4.
        place: of the process.
    """
    wide, norm = max(4, element), norm_bytes(shape, tokens, max(4, element))
    block = [
        norm,
        linear_bytes(shape, tokens, width, qkv_features, element, inward=True),
        linear_bytes(shape, tokens, width, width, element, inward=False),
        norm,
        linear_bytes(shape, tokens, width, mlp_features, element, inward=True),
        linear_bytes(shape, tokens, mlp_features, width, element, inward=False),
    ]
    padded = -(-vocabulary_size // shape.side) * shape.side
    return together(
        [
            embedding_bytes(shape, tokens, width, element, place),
            together(block).times(layers),
            norm,
            linear_bytes(shape, tokens, width, padded, element, inward=True),
            loss_bytes(shape, tokens, wide),
        ]
    )


def _block(shape: GridShape, tokens: int, features: int) -> int:
    """Elements of activations per process."""
    return tokens // shape.batch_blocks * (features // shape.side)


def _all_reduce(num_bytes: int, degree: int) -> int:
    return 2 * num_bytes * (degree - 1) // degree
