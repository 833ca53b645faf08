"""Which weight gradients of a graph are deferred to W. That depends on the shape of the graph alone.

`pipeloom.autograd.split_backward` reads the shape off a graph: the number of roots and then, for every node, its type,
the nodes to which its edges lead (-1: none), and

* for a product, whether its factors come out of a checkpoint (None: they must not be read),
* for a leaf's node, whether the leaf is an input of the stage.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from pipeloom.autograd.weight_products import PRODUCTS

LEAF = "AccumulateGrad"

# Nodes that may stand between a parameter and its product: all of these take almost no time.
_LIGHT = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "ToCopy", "Clone", "Expand"),
        *("Squeeze", "Unsqueeze", "Slice", "Select", "Narrow", "Split", "SplitWithSizes", "Unbind"),
    )
    for number in (0, 1)
)

_OF_TWO_MATRICES = frozenset({"MmBackward0", "AddmmBackward0", "BmmBackward0"})  # their last two operands


class DeferredProduct(NamedTuple):
    """A product whose weight gradients W computes.

    Attributes:
        position: of its node.
        name: of the type of its node.
        operands: the edges of the node that lead to weights.
        checkpointed: its factors can be read only while the engine executes the node.
        executed: the engine executes the node in I, because not all of its edges lead to weights.
        complete: no product before this one shares a weight with a product after it.
    """

    position: int
    name: str
    operands: tuple[int, ...]
    checkpointed: bool
    executed: bool
    complete: bool


class DeferredGradients(NamedTuple):
    """How to split the backward of graphs of one shape. Nodes are named by their position in the shape.

    Attributes:
        products: their weight gradients are computed in W.
        ready: nodes of the leaves whose gradients are computed in I.
        reused: whether a weight enters so many products that the order of summation changes the result.
    """

    products: Sequence[DeferredProduct]
    ready: Sequence[int]
    reused: bool


@lru_cache(maxsize=64)
def deferred_gradients(shape: tuple[Any, ...]) -> DeferredGradients:
    """Choose the weight gradients that are deferred.

    A weight's gradient is deferred only if all uses of the weight are products that allow it. Otherwise autograd, asked
    for the rest of the gradient, would compute all of it.
    """
    names, edges, marks = _decode(shape)
    entries = [0] * len(names)  # how many edges lead to a node
    for position in [*range(shape[0]), *(child for children in edges for child in children if child >= 0)]:
        entries[position] += 1
    covered = [0] * len(names)  # how many of these edges the engine does not follow if all offers are taken
    leaf_of: dict[int, int] = {}  # of the nodes between a product and the leaf of its weight
    offers: list[tuple[int, dict[int, int]]] = []
    for position, name in enumerate(names):
        if name not in PRODUCTS or marks[position] is None:
            continue
        paths = {operand: _path(edges[position][operand], names, edges, marks) for operand in PRODUCTS[name].operands}
        paths = {operand: path for operand, path in paths.items() if path}
        executed = any(child >= 0 and operand not in paths for operand, child in enumerate(edges[position]))
        if not paths or (marks[position] and not executed):
            continue
        if name in _OF_TWO_MATRICES and {len(edges[position]) - 2, len(edges[position]) - 1} <= paths.keys():
            continue  # a product of two weights: W would read one, which may be freed by then
        offers.append((position, {operand: path[-1] for operand, path in paths.items()}))
        for path in paths.values():
            covered[path[0]] += 1
            for place, link in enumerate(path):
                if link not in leaf_of:
                    leaf_of[link] = path[-1]
                    if place < len(path) - 1:
                        covered[path[place + 1]] += 1
    mixed = {leaf for link, leaf in leaf_of.items() if entries[link] != covered[link]}
    waiting = {leaf for leaf in leaf_of.values() if leaf not in mixed}
    ready = [p for p, name in enumerate(names) if name == LEAF and not marks[p] and p not in waiting]
    taken = [(p, {k: leaf for k, leaf in operands.items() if leaf in waiting}) for p, operands in offers]
    taken = [(position, operands) for position, operands in taken if operands]
    uses = Counter(leaf for _, operands in taken for leaf in operands.values())
    last = {leaf: index for index, (_, operands) in enumerate(taken) for leaf in operands.values()}
    added = {leaf for position, operands in taken if PRODUCTS[names[position]].adds for leaf in operands.values()}
    reused = any(number > (1 if leaf in added else 2) for leaf, number in uses.items())
    products, horizon = [], 0
    for index, (position, operands) in enumerate(taken):
        horizon = max(horizon, *(last[leaf] for leaf in operands.values()))
        executed = any(child >= 0 and operand not in operands for operand, child in enumerate(edges[position]))
        complete = not reused and index >= horizon
        products.append(
            DeferredProduct(position, names[position], tuple(operands), bool(marks[position]), executed, complete)
        )
    return DeferredGradients(products, ready, reused)


def _decode(shape: tuple[Any, ...]) -> tuple[list[str], list[list[int]], list[Any]]:
    """Names, edges and marks of the nodes of a shape."""
    names: list[str] = []
    edges: list[list[int]] = []
    for item in shape[1:]:
        if isinstance(item, type):
            names.append(item.__name__)
            edges.append([])
        else:
            edges[-1].append(item)
    marks = [
        children.pop() if name == LEAF or name in PRODUCTS else None
        for name, children in zip(names, edges, strict=True)
    ]
    return names, edges, marks


def _path(position: int, names: list[str], edges: list[list[int]], marks: list[Any]) -> list[int]:
    """The nodes from an edge's end to a weight's leaf, if all between are light; else none."""
    path = []
    while position >= 0:
        path.append(position)
        if names[position] == LEAF:
            return [] if marks[position] else path
        if names[position] not in _LIGHT or len(edges[position]) != 1:
            return []
        position = edges[position][0]
    return []
