"""The two halves of a backward: I, the gradients of a stage's inputs, and W, those of its weights.

I is one run of autograd's engine that frees the graph, as B does. I is cheaper than B: where a weight enters a product
(a linear layer, a convolution, a batched product, an embedding), the engine is not asked for the product's weight
gradient, so autograd's node skips it. The product's other factor and the gradient of its result are kept instead, and W
computes the weight gradient from these two with autograd's own formula.

    y = x @ w.T + b        AddmmBackward ──> b            I: dx = dy @ w      keeps x and dy
                             │    └──> TBackward ──> w    W: dw = dy.T @ x    goes into TBackward, dy.sum(0) into b
                             └──> graph of x

All other gradients are computed in I, set aside, and added in W: those of norms, biases that are added elsewhere,
compiled blocks and custom Functions. Autograd computes them along with the gradient of the input, or they are cheap. So
no gradient is computed twice, blocks under activation checkpointing are recomputed once, and ``.grad`` changes only in
W. Both kinds reach ``.grad`` through the parameter's own node of the graph: hooks on parameters run in W, once.

The first stage has no input that requires a gradient. Its I runs up to its first product, so it costs and frees as much
as the I of every other stage.

The products are read off the graph after every forward: any module works, and its graph may change each time. Two
private features of torch are used: autograd's nodes show what they saved as ``_saved_*``, and non-reentrant
checkpointing returns every saved tensor once for each handle of its holder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.utils import checkpoint

from pipeloom.autograd.deferred_gradients import LEAF, DeferredProduct, deferred_gradients
from pipeloom.autograd.weight_products import PRODUCTS, Formula

Root = Tensor | GradientEdge

# torch.autograd.backward and torch.autograd.grad call it, after checks that cost as much as a small stage's backward.
run_backward = torch.autograd.Variable._execution_engine.run_backward

# W passes weight gradients to autograd in groups of about this size: few calls, with gradients that are still cached.
# On a GPU a call costs as much as several kernels, and a group's gradients exist at once.
_GROUP_ELEMENTS = {"cpu": 2**16, "cuda": 2**25}


def root_of(tensor: Tensor) -> Root:
    """The root of a backward: an edge of the graph, which does not keep the tensor's memory alive."""
    if isinstance(tensor, nn.Parameter):  # its own gradient is one of W, as behind any operation
        tensor = tensor.view_as(tensor)
    node = tensor.grad_fn
    if node is None:
        return tensor
    # The node of a Python function needs a C++ node to stay alive, as in torch.autograd.graph.get_gradient_edge.
    token = tensor.view_as(tensor).grad_fn if isinstance(node, BackwardCFunction) else None
    return GradientEdge(node, tensor.output_nr, token)


class Repeatable:
    """Base of the objects that hooks save in place of a tensor, if unpacking them any number of times is harmless.

    Attributes:
        late: whether the tensor is made by unpacking, so it is read when the engine executes the node.
    """

    late: ClassVar[bool] = False


_HOLDER = getattr(checkpoint, "_Holder", ())  # checkpointing saves it in place of a tensor


@dataclass(slots=True, eq=False)
class WeightGradients:
    """What W needs of a graph after I: enough to add the weights' gradients, nothing else."""

    _heads: list[tuple[list[GradientEdge], bool]]
    _formulas: list[Formula | None]
    _gradients: list[Tensor | None]
    _ready: list[tuple[GradientEdge, Tensor]]

    @torch.no_grad()  # else products of saved factors are recorded, and keep them
    def accumulate(self) -> None:
        """Add to every parameter's ``.grad`` what B would have added. Call it once."""
        heads = [head for head, _ in self._ready]
        values = [gradient for _, gradient in self._ready]
        formulas, gradients, size, limit = self._formulas, self._gradients, 0, _GROUP_ELEMENTS["cpu"]
        self._ready = []
        for index, (edges, complete) in enumerate(self._heads):
            formula, gradient = formulas[index], gradients[index]
            formulas[index] = gradients[index] = None  # their tensors are freed as soon as they are used
            if formula is not None and gradient is not None:
                for edge, value in zip(edges, formula(gradient), strict=True):
                    if value is None:  # the formula has added it
                        continue
                    heads.append(edge)
                    values.append(value)
                    size += value.numel()
                    limit = _GROUP_ELEMENTS.get(value.device.type, limit)
            # A parameter's contributions from several products are added up before they go to .grad, as in B.
            if complete and size >= limit:
                run_backward(tuple(heads), tuple(values), False, False, (), True, True)
                heads, values, size = [], [], 0
        self._heads = []
        if heads:
            run_backward(tuple(heads), tuple(values), False, False, (), True, True)


def backward_input(
    roots: Sequence[Root], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightGradients]:
    """Run I: backward from `roots` to `leaves`. The graph is freed; nothing is added to any ``.grad``.

    Args:
        roots: where the backward starts.
        gradients: one for each root.
        leaves: the stage's inputs that require a gradient; leaves of the graph, each once.

    Returns:
        The gradient of each of `leaves`, None where nothing depends on it; and what W needs.
    """
    if not roots:
        return [None] * len(leaves), WeightGradients([], [], [], [])
    nodes, shape, hooked = _survey(roots, leaves)
    split = deferred_gradients(shape)
    products = split.products
    if split.reused:  # the engine starts with the operations that ran last
        products = sorted(products, key=lambda product: -nodes[product.position]._sequence_nr())
    wanted: list[Any] = list(leaves)
    heads: list[tuple[list[GradientEdge], bool]] = []
    formulas: list[Formula | None] = []
    caught: list[tuple[Tensor | None] | None] = [None] * len(products)
    prehooks = []
    for index, product in enumerate(products):
        node = nodes[product.position]
        edges = node.next_functions
        wanted.append(GradientEdge(node, 0))
        heads.append(([GradientEdge(*edges[operand]) for operand in product.operands], product.complete))
        if PRODUCTS[product.name].told:
            node.weights_later = True
        if product.checkpointed:
            formulas.append(None)
            prehooks.append(_read_when_executed(node, product, index, formulas, caught))
        else:
            formulas.append(PRODUCTS[product.name].formula(node, product.operands))
            if product.executed:  # at `wanted` the engine returns the gradient before the hooks of an executed node
                node.register_prehook(partial(caught.__setitem__, index))
    ready = [GradientEdge(nodes[position], 0) for position in split.ready]
    wanted += ready
    found = _run(roots, gradients, wanted, hooked, prehooks) if wanted else ()
    start, end = len(leaves), len(leaves) + len(products)
    results = [late[0] if late else early for late, early in zip(caught, found[start:end], strict=True)]
    kept = [(edge, gradient) for edge, gradient in zip(ready, found[end:], strict=True) if gradient is not None]
    return list(found[:start]), WeightGradients(heads, formulas, results, kept)


def _run(
    roots: Sequence[Root], gradients: Sequence[Tensor], wanted: Sequence[Any], hooked: list[Tensor], prehooks: list[Any]
) -> Sequence[Tensor | None]:
    """The gradients at `wanted`.

    Hooks on parameters do not run here: they run in W, on the complete gradient.
    """
    hooks: list[Any] = [leaf._backward_hooks for leaf in hooked]
    own = [dict(group) for group in hooks]
    for group in hooks:
        group.clear()
    try:
        found: Sequence[Tensor | None] = run_backward(
            tuple(roots), tuple(gradients), False, False, tuple(wanted), True, False
        )
    finally:
        for group, content in zip(hooks, own, strict=True):
            group.update(content)
        for prehook in prehooks:
            prehook.remove()
    return found


def _survey(roots: Sequence[Root], leaves: Sequence[Tensor]) -> tuple[list[Any], tuple[Any, ...], list[Tensor]]:
    """All nodes of a graph, breadth first; its shape; and the leaves with hooks that are not among `leaves`.

    For the shape see `pipeloom.autograd.deferred_gradients`.
    """
    inputs = set(map(id, leaves))
    places: dict[Any, int] = {}
    for root in roots:
        if isinstance(root, GradientEdge):  # else the output is a leaf
            places.setdefault(root.node, len(places))
    nodes = list(places)
    shape: list[Any] = [len(nodes)]
    hooked = []
    append, place_of = shape.append, places.get  # most of the time of a split is spent in this loop
    for node in nodes:  # grows while it is walked along
        kind = type(node)
        append(kind)
        for child, _ in node.next_functions:
            if child is None:
                append(-1)
                continue
            place = place_of(child)
            if place is None:
                place = places[child] = len(nodes)
                nodes.append(child)
            append(place)
        name = kind.__name__
        if name == LEAF:
            variable = node.variable
            own = id(variable) in inputs
            append(own)
            if not own and variable._backward_hooks:
                hooked.append(variable)
        elif name in PRODUCTS:
            append(_checkpointed(node, PRODUCTS[name].factors))
    return nodes, tuple(shape), hooked


class _Handles(dict[Any, Any]):
    """The handles of a checkpoint's holder. The holder deletes a handle after its first use; these stay."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if value is not None:
            super().__setitem__(key, value)


def _checkpointed(node: Any, factors: Sequence[str]) -> bool | None:
    """Whether the saved tensors of a node are recomputed, by a checkpoint or late; None if they must not be read.

    The node unpacks them too, and other hooks may not allow unpacking twice.
    """
    found = False
    saved_values = (getattr(node, factor) for factor in factors)
    for saved in chain.from_iterable(value if isinstance(value, tuple) else (value,) for value in saved_values):
        if saved.unpack_hook is not None:
            holder = saved.data
            if isinstance(holder, Repeatable):
                found = found or holder.late
                continue
            if not isinstance(holder, _HOLDER):
                return None
            if not isinstance(holder.handles, _Handles):
                holder.handles = _Handles(holder.handles)
            found = True
    return found


def _read_when_executed(
    node: Any,
    product: DeferredProduct,
    index: int,
    formulas: list[Formula | None],
    caught: list[tuple[Tensor | None] | None],
) -> Any:
    """Read a node's factors when the engine executes it, so that a checkpoint recomputes once for both."""

    def read(gradients: tuple[Tensor | None]) -> None:
        formulas[index], caught[index] = PRODUCTS[product.name].formula(node, product.operands), gradients

    return node.register_prehook(read)
