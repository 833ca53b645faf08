"""`BOUND`: functions that torch binds to Python directly, in place of operations of aten that take the same arguments.

A call of ``torch.ops.aten.mean.dim`` goes through Python code of torch, which takes several microseconds where other
code has run in between.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
BOUND: Mapping[Any, Any] = {
    # layers
    _aten.linear.default: torch._C._nn.linear,
    _aten.embedding.default: torch.embedding,
    _aten.conv1d.default: torch.conv1d,
    _aten.conv2d.default: torch.conv2d,
    _aten.batch_norm.default: torch.batch_norm,
    _aten.group_norm.default: torch.group_norm,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.rms_norm.default: torch.rms_norm,
    _aten.dropout.default: torch.dropout,
    _aten.max_pool2d.default: torch.max_pool2d,
    _aten.avg_pool2d.default: torch._C._nn.avg_pool2d,
    _aten.adaptive_avg_pool2d.default: torch._C._nn.adaptive_avg_pool2d,
    _aten.scaled_dot_product_attention.default: torch._C._nn.scaled_dot_product_attention,
    # of each element
    _aten.relu.default: torch.relu,
    _aten.relu_.default: torch.relu_,
    _aten.leaky_relu.default: torch._C._nn.leaky_relu,
    _aten.gelu.default: torch._C._nn.gelu,
    _aten.silu.default: torch._C._nn.silu,
    _aten.tanh.default: torch.tanh,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.exp.default: torch.exp,
    _aten.sin.default: torch.sin,
    _aten.cos.default: torch.cos,
    _aten.neg.default: torch.neg,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.add.Tensor: torch.add,
    _aten.add_.Tensor: Tensor.add_,
    _aten.sub.Tensor: torch.sub,
    _aten.mul.Tensor: torch.mul,
    _aten.mul_.Tensor: Tensor.mul_,
    _aten.div.Tensor: torch.div,
    _aten.where.self: torch.where,
    _aten.masked_fill.Scalar: Tensor.masked_fill,
    # sums and products
    _aten.matmul.default: torch.matmul,
    _aten.bmm.default: torch.bmm,
    _aten.addmm.default: torch.addmm,
    _aten.mean.dim: torch.mean,
    _aten.sum.dim_IntList: torch.sum,
    _aten.softmax.int: torch.softmax,
    _aten.log_softmax.int: torch.log_softmax,
    # shapes
    _aten.cat.default: torch.cat,
    _aten.stack.default: torch.stack,
    _aten.chunk.default: torch.chunk,
    _aten.unbind.int: torch.unbind,
    _aten.select.int: torch.select,
    _aten.transpose.int: torch.transpose,
    _aten.permute.default: torch.permute,
    _aten.reshape.default: torch.reshape,
    _aten.flatten.using_ints: torch.flatten,
    _aten.squeeze.dim: torch.squeeze,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: Tensor.view,
    _aten.expand.default: Tensor.expand,
    _aten.contiguous.default: Tensor.contiguous,
    _aten.clone.default: torch.clone,
}
