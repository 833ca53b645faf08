"""`TracedStage`: the part of a traced model that one stage runs."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from pipeloom.errors import RunError
from pipeloom.split.traced.bound import BOUND
from pipeloom.split.traced.inputs import InputRules


class Part(NamedTuple):
    """What a stage runs in one mode.

    Attributes:
        function: compiled from the operations: takes `held` and the values, returns those in `makes`.
        held: names of the parameters, buffers and constants, by the stage's own names.
        reads: names of the other values that it reads.
        makes: names of the values that it returns.
        arrives: names of the values in the message from the stage before; of the first stage, the leaves of a batch.
        leaves: the values in the message to the next stage, each a `Name`; of the last stage, the leaves of the output,
            constants among them.
        pops, stashes: names of values that skip stages -> their names in the graph.
        rules: of the first stage, what a batch must be.
        outputs: of the last stage, the structure of the output.
    """

    function: "Code"
    held: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    arrives: tuple[str, ...]
    leaves: tuple[Any, ...]
    pops: Mapping[str, str]
    stashes: Mapping[str, str]
    rules: InputRules | None = None
    outputs: TreeSpec | None = None


class Code:
    """Operations of a graph as one function; copies of a stage share it.

    Args:
        nodes: the operations.
        inputs: the nodes that the function takes, in order.
        results: the nodes that it returns.
        root: has the submodules that the operations call.
        changed: inputs that an operation changes in place; the function changes copies.
        views: results in the memory of a buffer that an operation changes; the function returns copies.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: Sequence[fx.Node],
        results: Sequence[fx.Node],
        root: nn.Module,
        changed: Set[fx.Node],
        views: Set[fx.Node],
    ) -> None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {node: graph.placeholder(node.name) for node in inputs}
        for node in inputs:
            if node in changed:
                copies[node] = graph.call_method("clone", (copies[node],))
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta = {}
            if copies[node].op == "call_function":
                copies[node].target = BOUND.get(copies[node].target, copies[node].target)
        for node in views:
            copies[node] = graph.call_method("clone", (copies[node],))
        graph.output(tuple(copies[node] for node in results))
        self.call: Callable[..., tuple[Any, ...]] = fx.GraphModule(root, graph).forward

    def __deepcopy__(self, _: Any) -> Self:
        return self


class Parts(dict[bool, Part]):
    """What a stage runs, by mode; copies of a stage share it."""

    def __deepcopy__(self, _: Any) -> Self:
        return self


class Container(nn.Module):
    """Holds parameters under the names that they have in the model."""


class Name(NamedTuple):
    """A value by its name in the graph, and whether it is one floating-point number."""

    name: str
    is_number: bool = False


class TracedStage(nn.Module):
    """A stage that runs a part of a traced graph, with the model's own parameters under their own names.

    The message to the next stage has the values that it reads from this one. Other values skip stages.

    Args:
        modules: the model's modules that hold its parameters, by name.
        parts: what it runs, by mode.
        stashes, pops: names of the values that skip stages.
        without_gradient: of `stashes`, those without a gradient.
    """

    sliceable = False

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        tensors: Sequence[tuple[str, Tensor, bool]],
        parts: Mapping[bool, Part],
        *,
        stashes: tuple[str, ...],
        pops: tuple[str, ...],
        without_gradient: tuple[str, ...],
    ) -> None:
        super().__init__()
        for name, module in modules:
            parent, last = self._parent(name)
            parent.add_module(last, module)
        for name, tensor, persistent in tensors:
            self._hold(name, tensor, persistent)
        self.stashes, self.pops, self.without_gradient = stashes, pops, without_gradient
        self._parts = Parts(parts)
        self._sources = {mode: [self._source(name) for name in part.held] for mode, part in parts.items()}

    def _hold(self, name: str, tensor: Tensor, persistent: bool) -> None:
        """Register a tensor whose module is not wholly here."""
        parent, last = self._parent(name)
        if isinstance(tensor, nn.Parameter):
            parent.register_parameter(last, tensor)
        else:
            parent.register_buffer(last, tensor, persistent=persistent)

    def _parent(self, name: str) -> tuple[nn.Module, str]:
        """The container of a module or tensor, made where it is missing, and the name in it."""
        *containers, last = name.split(".")
        parent: nn.Module = self
        for part in containers:
            if part not in parent._modules:
                parent.add_module(part, Container())
            parent = parent.get_submodule(part)
        return parent, last

    def _source(self, name: str) -> tuple[dict[str, Any], str]:
        owner, _, last = name.rpartition(".")
        module = self.get_submodule(owner)
        return module._parameters if last in module._parameters else module._buffers, last

    def numbers(self) -> Any:
        """The last stage's output with each floating-point number 0.0, and other values None."""
        part = self._parts[self.training]
        if part.outputs is None:
            return None
        zero = torch.zeros(())
        return tree_unflatten(
            [zero if getattr(leaf, "is_number", False) else None for leaf in part.leaves], part.outputs
        )

    def check_inputs(self, value: Any) -> None:
        """Raises InputError for a micro-batch for which the trace does not hold. Called on the first stage."""
        rules = self._parts[self.training].rules
        if rules is not None:
            rules.check(value)

    def forward(self, value: Any, popped: dict[str, Any] | None = None) -> Any:
        """Run the part.

        Args:
            value: on the first stage a batch: the model's only argument, a tuple of arguments, a dict of keyword
                arguments, or ``(args, kwargs)``; else the message of the stage before.
            popped: values that skip stages.
        """
        part = self._parts[self.training]
        if part.rules is not None:
            arrived = part.rules.check(value)
        else:
            mode, *arrived = value
            if mode is not self.training:
                raise RunError(
                    "the stage before is in another mode: all ranks must be in training mode, or all in evaluation "
                    "mode. Call pipe.train() or pipe.eval() on each."
                )
        values = dict(zip(part.arrives, arrived, strict=True))
        for skip, name in part.pops.items():
            values[name] = (popped or {})[skip]
        held = [tensors[name] for tensors, name in self._sources[self.training]]
        inputs = [values[name] for name in part.reads]
        values |= zip(part.makes, part.function.call(*held, *inputs), strict=True)
        if part.outputs is not None:
            leaves = [values[leaf.name] if isinstance(leaf, Name) else leaf for leaf in part.leaves]
            output = tree_unflatten(leaves, part.outputs)
        else:
            output = (self.training, *(values[leaf.name] for leaf in part.leaves))
        if not self.stashes:
            return output
        return output, {skip: values[part.stashes[skip]] if skip in part.stashes else None for skip in self.stashes}
