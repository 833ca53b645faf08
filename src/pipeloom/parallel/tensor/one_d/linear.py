"""Linear layers that processes share (arXiv:1909.08053, section 3).

    column   W = [W_0 .. W_t-1] by outputs   y_i = f(x) W_i       f: backward sums gradients of x
    row      W = [W_0 .. W_t-1] by inputs    y = g(sum x_i W_i)   g: forward sums outputs; the bias is added once, after

Under sequence parallelism f gathers tokens and g scatters them. Collectives and products are separate nodes of the
graph, so a split backward has the collectives in I and defers the weight gradients to W (`split_backward`).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.parallel import axis_functions
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.tensor.one_d.tokens import NotKept, gather_tokens, is_gathered, scatter_sum


def enter(x: Tensor, axis: Axis, *, sequence: bool) -> Tensor:
    """The input of column layers: f, or with `sequence` the tokens of all processes."""
    return gather_tokens(x, axis) if sequence else axis_functions.copy_to(x, axis)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    weight = weight.t() if transposed else weight
    if not is_gathered(x):
        return F.linear(x, weight, bias)
    with NotKept(x):
        return F.linear(x, weight, bias)


class ColumnLinear(nn.Module):
    """A linear layer of which this process has some of the outputs: [.., in] -> [.., out / t].

    Args:
        weight: the block, [out / t, in]; with `transposed` [in, out / t].
        bias: the block, [out / t].
        transposed: whether the weight is laid out as in transformers' ``Conv1D``.
        axis: of the processes that share the layer.
        sequence: whether the input has a part of the tokens, [B, S / t, in].
        entered: whether a module around this one has applied f already.
        gathers: the full number of outputs, if they are gathered behind the product.
    """

    sliceable = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        transposed: bool,
        axis: Axis,
        sequence: bool,
        entered: bool = False,
        gathers: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.axis, self.transposed, self.sequence = axis, transposed, sequence
        self.entered, self.gathers = entered, gathers

    def forward(self, x: Tensor) -> Tensor:
        if not self.entered:
            x = enter(x, self.axis, sequence=self.sequence)
        y = _product(x, self.weight, self.bias, self.transposed)
        if self.gathers is None:
            return y
        return axis_functions.gather(y, self.axis, -1)[..., : self.gathers]  # the last blocks may be padded

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, axis={self.axis}, sequence={self.sequence}"


class RowLinear(nn.Module):
    """A linear layer of which this process has some of the inputs: [.., in / t] -> [.., out].

    Args:
        weight: the block, [out, in / t]; with `transposed` [in / t, out].
        bias: all of it, [out].
        transposed: as for `ColumnLinear`.
        axis: of the processes that share the layer.
        sequence: whether the output has a part of the tokens, [B, S / t, out].
        splits: whether the input is whole, and this process takes its part. So it does of any input that is whole but
            for sequence parallelism, where such an input may have other tokens on each process.
    """

    sliceable = True

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        *,
        transposed: bool,
        axis: Axis,
        sequence: bool,
        splits: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.axis, self.transposed, self.sequence, self.splits = axis, transposed, sequence, splits

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.weight.shape[0 if self.transposed else 1]
        if self.splits or (not self.sequence and x.shape[-1] == inputs * self.axis.degree):
            x = axis_functions.scatter(x, self.axis, -1)
        elif x.shape[-1] != inputs:
            raise InputError(
                f"a layer of kind row has {inputs} inputs on each process, and gets {x.shape[-1]}: the layers before "
                "it are not cut. Leave it out of the plan, or cut them by columns."
            )
        y = _product(x, self.weight, None, self.transposed)
        y = scatter_sum(y, self.axis, sequence=self.sequence)
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        return f"weight={list(self.weight.shape)}, axis={self.axis}, sequence={self.sequence}"
