"""The products whose weight gradients can be deferred, and the formulas by which W computes them.

`PRODUCTS` are the autograd nodes whose weight gradient can be computed later, from a saved factor and the result's
gradient. Each has the tensors that must be kept, and autograd's own formula, with its order of factors, so that results
are bitwise equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.autograd import fp8_linear, grouped_linear

# Gradient of a product's result -> gradients of some of its operands, or of one; None: added to the operand's .grad.
Formula = Callable[[Tensor], Sequence[Tensor | None]]
Part = Callable[[Tensor], Tensor]


class Product(NamedTuple):
    """One kind of node.

    Attributes:
        operands: the edges of the node that may lead to weights.
        factors: all factors that the node may have saved (``node._raw_saved_...``); of a Function, all in one.
        formula: ``formula(node, operands)`` reads the factors and returns a function that computes the gradients of
            these operands.
        told: whether the node computes its weight gradient unless its attribute ``weights_later`` is set. Autograd's
            own nodes see which gradients are asked for, those of a Function do not.
        adds: whether the product may add to the ``.grad`` of a weight itself. Then the order in which the products of a
            weight run changes the sum.
    """

    operands: tuple[int, ...]
    factors: tuple[str, ...]
    formula: Callable[[Any, tuple[int, ...]], Formula]
    told: bool = False
    adds: bool = False


def _by_operand(gradient_of: Mapping[int, Callable[[Any], Part]]) -> Callable[..., Formula]:
    """A formula made of one formula per operand."""

    def formula(node: Any, operands: tuple[int, ...]) -> Formula:
        parts = [gradient_of[operand](node) for operand in operands]
        return lambda gradient: [part(gradient) for part in parts]

    return formula


def _scaled(tensor: Tensor, factor: complex) -> Tensor:
    return tensor if factor == 1 else tensor * factor


def _of_left(right: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], alpha: complex) -> Part:
    """Gradient of ``left`` in ``alpha * left @ right``, laid out as ``left`` is."""
    if strides[0] == 1 and strides[1] == sizes[0]:  # by columns
        return lambda gradient: _scaled(right.conj().mm(gradient.t()).t(), alpha)
    return lambda gradient: _scaled(gradient.mm(right.t().conj()), alpha)


def _of_right(left: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], alpha: complex) -> Part:
    """Gradient of ``right`` in ``alpha * left @ right``, laid out as ``right`` is."""
    if strides[0] == 1 and strides[1] == sizes[0]:  # by columns
        return lambda gradient: _scaled(gradient.t().mm(left.conj()).t(), alpha)
    return lambda gradient: _scaled(left.t().conj().mm(gradient), alpha)


def _mm_left(node: Any) -> Part:
    return _of_left(node._saved_mat2, node._saved_self_sym_sizes, node._saved_self_sym_strides, 1)


def _mm_right(node: Any) -> Part:
    return _of_right(node._saved_self, node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides, 1)


def _addmm_bias(node: Any) -> Part:
    beta = node._saved_beta
    return lambda gradient: _scaled(gradient, beta)  # autograd sums what was broadcast


def _addmm_left(node: Any) -> Part:
    sizes, strides = node._saved_mat1_sym_sizes, node._saved_mat1_sym_strides
    return _of_left(node._saved_mat2, sizes, strides, node._saved_alpha.conjugate())


def _addmm_right(node: Any) -> Part:
    sizes, strides = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    return _of_right(node._saved_mat1, sizes, strides, node._saved_alpha.conjugate())


def _bmm_left(node: Any) -> Part:
    right = node._saved_mat2
    return lambda gradient: gradient.bmm(right.transpose(1, 2).conj())


def _bmm_right(node: Any) -> Part:
    left = node._saved_self
    return lambda gradient: left.transpose(1, 2).conj().bmm(gradient)


def _convolution(node: Any, operands: tuple[int, ...]) -> Formula:
    settings = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [operand in operands for operand in range(3)],
    )
    x, weight = node._saved_input, node._saved_weight

    def formula(gradient: Tensor) -> list[Tensor]:
        gradients = torch.ops.aten.convolution_backward(gradient, x, weight, *settings)
        return [gradients[operand] for operand in operands]

    return formula


def _embedding(node: Any, operands: tuple[int, ...]) -> Formula:
    indices = node._saved_indices
    padding = node._saved_padding_idx
    settings = (
        node._saved_weight_sym_argsize_0,
        padding if padding < 2**63 else -1,  # no padding is shown as an unsigned -1
        node._saved_scale_grad_by_freq,
        node._saved_sparse,
    )
    return lambda gradient: [torch.ops.aten.embedding_backward(gradient, indices, *settings)]


PRODUCTS: Mapping[str, Product] = {
    "MmBackward0": Product((0, 1), ("_raw_saved_self", "_raw_saved_mat2"), _by_operand({0: _mm_left, 1: _mm_right})),
    "AddmmBackward0": Product(
        (0, 1, 2),
        ("_raw_saved_mat1", "_raw_saved_mat2"),
        _by_operand({0: _addmm_bias, 1: _addmm_left, 2: _addmm_right}),
    ),
    "BmmBackward0": Product((0, 1), ("_raw_saved_self", "_raw_saved_mat2"), _by_operand({0: _bmm_left, 1: _bmm_right})),
    "ConvolutionBackward0": Product((1, 2), ("_raw_saved_input", "_raw_saved_weight"), _convolution),
    "EmbeddingBackward0": Product((0,), ("_raw_saved_indices",), _embedding),
    "GroupedLinearBackward": Product(
        (1,), ("_raw_saved_tensors",), grouped_linear.weight_formula, told=True, adds=True
    ),
    "Fp8LinearBackward": Product((1,), ("_raw_saved_tensors",), fp8_linear.weight_formula, told=True),
}
