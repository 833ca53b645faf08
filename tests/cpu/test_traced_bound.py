"""Functions that stand for operations of traced graphs return bitwise what these return, of the same arguments."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.split.traced.bound import BOUND

aten = torch.ops.aten
X, Y = torch.rand(2, 4, 6, 6) + 0.1, torch.rand(2, 4, 6, 6) + 0.1
M, N = torch.rand(3, 4), torch.rand(4, 5)
IMAGES, SEQUENCES = torch.rand(2, 4, 8, 8), torch.rand(2, 4, 8)
ONES = torch.ones(4)

# Positional arguments as traces have them, with those that are often left out.
ARGUMENTS = {
    aten.linear.default: [(M, N.T, torch.rand(5)), (M, N.T)],
    aten.embedding.default: [(N, torch.tensor([1, 3])), (N, torch.tensor([1, 3]), 0, False, False)],
    aten.conv1d.default: [(SEQUENCES, torch.rand(3, 4, 3), torch.rand(3), [2], [1], [1], 1)],
    aten.conv2d.default: [(IMAGES, torch.rand(6, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], 2)],
    aten.batch_norm.default: [(IMAGES, ONES, ONES, None, None, True, 0.1, 1e-5, True)],
    aten.group_norm.default: [(IMAGES, 2, ONES, ONES, 1e-5), (IMAGES, 2)],
    aten.layer_norm.default: [(M, [4], ONES, ONES, 1e-5), (M, [4])],
    aten.rms_norm.default: [(M, [4], ONES, 1e-6), (M, [4])],
    aten.dropout.default: [(M, 0.5, True), (M, 0.5, False)],
    aten.max_pool2d.default: [(IMAGES, [2, 2]), (IMAGES, [3, 3], [2, 2], [1, 1], [1, 1], True)],
    aten.avg_pool2d.default: [(IMAGES, [2, 2]), (IMAGES, [3, 3], [2, 2], [1, 1], True, False, 4)],
    aten.adaptive_avg_pool2d.default: [(IMAGES, [2, 1])],
    aten.scaled_dot_product_attention.default: [(X, X, Y), (X, X, Y, None, 0.0, True)],
    aten.leaky_relu.default: [(-X,), (-X, 0.2)],
    aten.gelu.default: [(X,)],
    aten.pow.Tensor_Scalar: [(X, 2), (X, 0.5)],
    aten.add.Tensor: [(X, Y), (X, 2), (X, 1.5)],
    aten.add_.Tensor: [(X, Y), (X, 2)],
    aten.sub.Tensor: [(X, Y), (X, 2)],
    aten.mul.Tensor: [(X, Y), (X, 0.5)],
    aten.mul_.Tensor: [(X, Y), (X, 0.5)],
    aten.div.Tensor: [(X, Y), (X, 3)],
    aten.where.self: [(X > 0.5, X, Y)],
    aten.masked_fill.Scalar: [(X, X > 0.5, float("-inf"))],
    aten.matmul.default: [(X, Y), (M, N)],
    aten.bmm.default: [(X[0], Y[0])],
    aten.addmm.default: [(torch.rand(5), M, N)],
    aten.mean.dim: [(X, [2, 3]), (X, [-1], True), (X, None)],
    aten.sum.dim_IntList: [(X, [2, 3]), (X, [-1], True)],
    aten.softmax.int: [(X, -1), (X, 1, torch.float64)],
    aten.log_softmax.int: [(X, -1), (X, 1, torch.float64)],
    aten.cat.default: [([X, Y],), ([X, Y], 1)],
    aten.stack.default: [([X, Y],), ([X, Y], 1)],
    aten.chunk.default: [(X, 2), (X, 2, -1)],
    aten.unbind.int: [(X,), (X, 1)],
    aten.select.int: [(X, 1, 2)],
    aten.transpose.int: [(X, 1, 2)],
    aten.permute.default: [(X, [0, 2, 3, 1])],
    aten.reshape.default: [(X.transpose(1, 2), [2, -1])],
    aten.flatten.using_ints: [(X,), (X, 1), (X, 1, 2)],
    aten.squeeze.dim: [(X[:1], 0), (X, 0)],
    aten.unsqueeze.default: [(X, 1)],
    aten.view.default: [(X, [2, -1])],
    aten.expand.default: [(X[:1], [3, -1, 6, 6])],
    aten.contiguous.default: [(X.transpose(1, 2),)],
    aten.clone.default: [(X.transpose(1, 2),)],
}
KEYWORDS = {
    aten.add.Tensor: {"alpha": 2},
    aten.sub.Tensor: {"alpha": 2},
    aten.gelu.default: {"approximate": "tanh"},
    aten.mean.dim: {"dtype": torch.float64},
    aten.sum.dim_IntList: {"dtype": torch.float64},
    aten.scaled_dot_product_attention.default: {"scale": 0.3},
    aten.clone.default: {"memory_format": torch.contiguous_format},
    aten.contiguous.default: {"memory_format": torch.contiguous_format},
    aten.addmm.default: {"beta": 0.5, "alpha": 2},
}


@pytest.mark.parametrize("operation", BOUND, ids=str)
def test_a_function_returns_what_its_operation_returns(operation):
    for arguments in ARGUMENTS.get(operation, [(X,)]):
        for keywords in ({}, KEYWORDS.get(operation, {})):
            results = []
            for function in (operation, BOUND[operation]):
                torch.manual_seed(1)
                given = tree_map_only(torch.Tensor, torch.clone, arguments)
                results.append(([*tree_leaves(function(*given, **keywords))], given))
            (expected, changed), (found, found_changed) = results
            assert len(expected) == len(found)
            pairs = zip(expected + tree_leaves(changed), found + tree_leaves(found_changed), strict=True)
            for one, two in pairs:
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one, two)
                    assert (one.dtype, one.stride()) == (two.dtype, two.stride())
                else:
                    assert one == two or one is two
