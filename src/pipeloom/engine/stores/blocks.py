"""`Blocks`: how the processes inside a stage, along axes such as tp, share its parameters; this one shares nothing."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.transport.values import Value

Gradients = Sequence[Tensor | None]


class Blocks:
    """How processes inside a stage share parameters. This class: each process has all parameters of its stage.

    Attributes:
        divides: whether several processes share each stage.
        lines: the processes that share a stage, for all stages and replicas, where these draw random numbers alike.
        leads: whether this process is the first of them.
    """

    divides: bool = False
    lines: Sequence[Sequence[int]] = ()
    leads: bool = True

    def full_shape(self, parameter: nn.Parameter, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the full parameter.

        Args:
            parameter: a main parameter, whose own shape may be that of a shard.
            shape: of this process's block.
        """
        return shape

    def cut(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This process's block of a full tensor."""
        return full

    def join(self, parameter: nn.Parameter, block: Tensor, *, as_stack: bool = False) -> Tensor:
        """The full tensor from the blocks of all processes inside the stage; every one of them calls it.

        Args:
            parameter: which, a main parameter.
            block: this process's, such as of its gradient.
            as_stack: dimension 0 stays cut: of a stack of matrices, such as of experts, those that this process has.
        """
        return block

    def common(self, number: int) -> int:
        """The number of the first process inside the stage; every one of them calls it."""
        return number

    def full_output(self, output: Value) -> Value:
        """An output of the last stage in place of this process's part of it; every one of them calls it."""
        return output

    def owned(self, parameter: nn.Parameter, values: Tensor, span: Range | None) -> list[Tensor]:
        """The elements that this process owns: over all processes of a stage, each element of a parameter once.

        Args:
            parameter: which, a main parameter.
            values: one number per element of `parameter`, such as its gradient.
            span: the elements of the block that `parameter` holds; None: all.
        """
        return [values]

    def leave(self) -> None:
        """Called after an error: notifies the other processes inside the stage, which may wait for this one."""

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the processes inside the stage; every one of them calls it."""
        return values

    def gradient_sum(
        self, parameters: Mapping[str, nn.Parameter], ranges: Mapping[str, Range], dtype: Callable[[str], torch.dtype]
    ) -> "BlockSum | None":
        """The sum over the processes inside a stage of gradients of which each has a part; None: there are none.

        Args:
            parameters: main parameters by name.
            ranges: the elements of their blocks that they hold; missing parameters hold all.
            dtype: of a parameter's gradient.
        """
        return None


class BlockSum:
    """Sums gradients over processes inside a stage once per step: the new part, not what earlier steps left.

    Args:
        parameters: those of which processes have parts of the gradient.
        total: returns the sums of gradients in the order of `parameters`; every process calls it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], total: Callable[[Gradients], Gradients]) -> None:
        self.parameters, self.total = parameters, total
        self._set_aside: list[Tensor | None] = []

    def begin(self) -> None:
        """Set aside the gradients that earlier steps left."""
        self._set_aside = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sum this step's gradients, after sums over replicas and between stages, and add those of earlier steps."""
        totals = self.total([parameter.grad for parameter in self.parameters])
        for parameter, total, before in zip(self.parameters, totals, self._set_aside, strict=True):
            parameter.grad = total if before is None else before if total is None else before.add_(total)
        self._set_aside = []
