"""Compares the graph of a traced model with the model's own forward, on the example."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from pipeloom.errors import SplitError, folded, one_line
from pipeloom.split.closeness import close
from pipeloom.split.profile import untouched
from pipeloom.split.traced.gradients import OwnBackwards, gradients, same_gradients
from pipeloom.split.traced.segments import operations
from pipeloom.split.traced.watch import Line, OtherGenerators, handled_errors

_WAYS = "name the layers with layers=, or pass a list of modules that you wrote, one per stage"
_OF_CODE = (AttributeError, ImportError, LookupError)  # errors that forwards handle without a trace, too
Handled = dict[Line, BaseException]


class OwnForward:
    """The forward of a model, run beside its trace.

    Args:
        model: the model.
        example: ``(args, kwargs)``.
    """

    def __init__(self, model: nn.Module, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        self._model, self._example = model, example
        self._backwards = OwnBackwards()
        self._drawn: list[str] = []
        self._handled: Handled = {}
        tensors = [*model.parameters(), *model.buffers(), *tree_leaves(example)]
        devices = {tensor.device for tensor in tensors if isinstance(tensor, Tensor)}
        self._has_values = not any(device.type == "meta" for device in devices)
        self._cuda = sorted(device.index or 0 for device in devices if device.type == "cuda")

    @contextmanager
    def traced(self) -> Iterator[None]:
        """In the block the model is traced; afterwards Python's and numpy's random states are those of before."""
        generators = OtherGenerators()
        try:
            with handled_errors(self._model, self._handled):
                yield
            self._drawn = generators.drawn()
        finally:
            generators.restore()

    def run(self, handled: Handled) -> list[Any] | None:
        """The output on the example; None: the model is on the meta device.

        Args:
            handled: gets the errors that the forward handles.

        Raises:
            SplitError: the forward raises an error.
        """
        if not self._has_values:
            return None
        try:
            with self._undisturbed() as generators:
                expected = self._call(self._example, handled)
                self._drawn = [name for name in generators.drawn() if name in self._drawn]
        except Exception as error:
            raise SplitError(
                f"example={folded(self._example)}: the forward of {type(self._model).__name__} raises "
                f"{one_line(error).rstrip('.')}. Pass inputs that the model takes."
            ) from error
        return expected

    def check(
        self,
        graph_module: fx.GraphModule,
        inputs: Sequence[str],
        tensors: Mapping[str, Tensor],
        trace_again: Callable[[], Any],
    ) -> None:
        """Compare with the graph. A model on the meta device cannot run; what its trace has seen is checked alone.

        Args:
            graph_module: has the graph.
            inputs: its placeholders for the leaves of the example.
            tensors: values of its other placeholders.
            trace_again: traces the model, to see whether errors of the trace were those of first calls.

        Raises:
            SplitError: the forward draws from other generators than torch's, handles errors of the trace, raises an
                error, or computes something else than the graph; or its backward does.
        """
        in_own: Handled = {}
        expected = self.run(in_own)
        self._refuse_draws()
        self._refuse_handled(in_own, trace_again)
        if expected is None:
            return
        self._compare(expected, graph_module, inputs, tensors, self._example)
        if self._backwards.found and self._model.training:
            self._compare_gradients(graph_module, inputs, tensors)
        if self._cuda:  # there, a value that is out of range, such as a negative index, ends all further work
            return
        other = tree_map(_other_values, self._example)
        try:
            with self._undisturbed(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = self._call(other, {})
        except Exception:
            return  # the model does not take these values
        self._compare(expected, graph_module, inputs, tensors, other)

    @contextmanager
    def _undisturbed(self, *, keeps_activations: bool = False) -> Iterator[OtherGenerators]:
        """In the block, the model or its graph may run, from one random state."""
        generators = OtherGenerators()
        bound = [(part, dict(vars(part))) for part in self._model.modules()]
        nothing = torch.empty(0)
        hooks: Any = torch.autograd.graph.saved_tensors_hooks(lambda _: nothing, lambda kept: kept)
        try:
            with untouched([self._model], self._cuda), nullcontext() if keeps_activations else hooks:
                yield generators
        finally:
            generators.restore()
            for part, attributes in bound:
                vars(part).clear()
                vars(part).update(attributes)

    def _call(self, example: Any, handled: Handled) -> list[Any]:
        args, kwargs = tree_map(_fresh, example)
        with handled_errors(self._model, handled), self._backwards:
            result = self._model(*args, **kwargs)
        self._backwards.look_into(result)
        return _detached(result)

    def _refuse_draws(self) -> None:
        if not self._drawn:
            return
        line: Line | None = None
        if self._has_values:
            args, kwargs = tree_map(_fresh, self._example)
            with self._undisturbed() as generators:
                line = generators.line_that_draws(lambda: self._model(*args, **kwargs))
        raise SplitError(
            f"the forward of {type(self._model).__name__} draws from {' and '.join(self._drawn)}"
            f"{'' if line is None else f' at {line}'}: a trace would keep the numbers of one call. Draw with torch, "
            "such as torch.rand, or draw inside of a layer and name the layers with layers=."
        )

    def _refuse_handled(self, in_own: Handled, trace_again: Callable[[], Any]) -> None:
        ignored = ImportError if self._has_values else _OF_CODE
        found = {line: error for line, error in self._handled.items() if not isinstance(error, ignored)}
        found = {line: error for line, error in found.items() if line not in in_own}
        if not found:
            return
        again: Handled = {}
        with self._undisturbed(keeps_activations=True), handled_errors(self._model, again):
            trace_again()
        for line, error in found.items():
            if line in again:
                reason = one_line(error).partition(" (unhinted")[0][:200].rstrip(".")
                raise SplitError(
                    f"the forward of {type(self._model).__name__} handles an error at {line}, which only the trace "
                    f"raises ({reason}): the traced graph would contain only the handler's branch. Remove the handler, "
                    f"or {_WAYS}."
                )

    def _compare(
        self,
        expected: list[Any],
        graph_module: fx.GraphModule,
        inputs: Sequence[str],
        tensors: Mapping[str, Tensor],
        example: Any,
    ) -> None:
        kind = type(self._model).__name__
        leaves = tree_leaves(tree_map(_fresh, example))
        try:
            with self._undisturbed():
                found = _detached(_run(graph_module, {**tensors, **dict(zip(inputs, leaves, strict=True))}))
        except Exception as error:
            seen = f"raises {one_line(error).rstrip('.')}"
        else:
            if len(found) == len(expected) and all(map(_equal, found, expected)):
                return
            seen = "computes another result"
        raise SplitError(
            f"the trace of {kind} {seen}, and its forward does not: what it does without torch's operations, or "
            f"in a trace alone, is lost. Compute it with torch, or {_WAYS}."
        )

    def _compare_gradients(
        self, graph_module: fx.GraphModule, inputs: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> None:
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        args, kwargs = tree_map(_fresh, self._example)
        with self._undisturbed(keeps_activations=True):
            expected = gradients(self._model(*args, **kwargs), trained)
        leaves = tree_leaves(tree_map(_fresh, self._example))
        with self._undisturbed(keeps_activations=True):
            found = gradients(_run(graph_module, {**tensors, **dict(zip(inputs, leaves, strict=True))}), trained)
        if not same_gradients(found, expected):
            raise SplitError(
                f"the trace of {type(self._model).__name__} computes other gradients than its forward: "
                f"{self._backwards.found} is lost. Use operations of torch with these gradients, or {_WAYS}."
            )


def _run(graph_module: fx.GraphModule, values: dict[str, Any]) -> list[Any]:
    """The leaves of the output of a graph, from the values of its placeholders."""
    graph = graph_module.graph
    nodes, output = operations(graph), graph.output_node()
    last_user = {source: node for node in [*nodes, output] for source in node.all_input_nodes}
    for node in nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source.name])
        if node.op == "get_attr":
            values[node.name] = getattr(graph_module, str(node.target))
        else:
            values[node.name] = node.target(*args, **kwargs)  # type: ignore[operator]
        for source in node.all_input_nodes:
            if last_user[source] is node:
                del values[source.name]
    flat, _ = tree_flatten(output.args[0])
    return [values[leaf.name] if isinstance(leaf, fx.Node) else leaf for leaf in flat]


def _detached(result: Any) -> list[Any]:
    return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(result)]


def _fresh(leaf: Any) -> Any:
    """A copy that a forward may change."""
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


def _other_values(leaf: Any) -> Any:
    """Floating-point numbers of the other sign, and all elements in another order."""
    if not isinstance(leaf, Tensor) or not leaf.numel():
        return leaf
    flipped = leaf.detach().flatten().flip(0).view(leaf.shape)
    return -flipped if leaf.is_floating_point() else flipped


def _equal(found: Any, expected: Any) -> bool:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return isinstance(found, Tensor) == isinstance(expected, Tensor)
    if found.shape != expected.shape:
        return False
    if expected.is_complex():
        found, expected = torch.view_as_real(found.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    return close(found, expected) if expected.is_floating_point() else torch.equal(found, expected)
