"""The places where a traced graph may be cut.

A segment is a call of a module, with the operations between two calls as segments of their own. Segments are calls of
the outermost modules; where these are too few to balance, of the modules inside.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, fx

from pipeloom.errors import SplitError
from pipeloom.split.chain_partition import partition
from pipeloom.split.traced.regions import switch_gradients

_LEAST = 3  # segments per stage
_CHECKS = ("_assert", "sym_constrain_range", "_guards_fn")


class Segment(NamedTuple):
    """Consecutive operations.

    Attributes:
        name: of the module that is called; of operations between calls, of the module that they are in.
        nodes: the operations.
    """

    name: str
    nodes: tuple[fx.Node, ...]


def operations(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that compute, in order, without checks of sizes and without what nothing reads."""
    output = graph.output_node()
    needed: set[fx.Node] = set(output.all_input_nodes)
    kept = []
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        if node in needed or (_has_effect(node) and not str(node.target).removeprefix("aten.").startswith(_CHECKS)):
            needed.update(node.all_input_nodes)
            kept.append(node)
    return kept[::-1]


def _has_effect(node: fx.Node) -> bool:
    return bool(written(node)) or (node.op == "call_function" and not hasattr(node.target, "_schema"))


def written(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation changes in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    found = []
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, list | tuple) else [value]
            found += [each for each in values if isinstance(each, fx.Node)]
    return found


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory a view reads."""
    schema = getattr(node.target, "_schema", None)
    while schema is not None and any(r.alias_info is not None for r in schema.returns):
        places = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and i < len(node.args)]
        viewed = node.args[places[0]] if places else None
        if not isinstance(viewed, fx.Node):
            return node
        node = viewed
        schema = getattr(node.target, "_schema", None)
    return node


def _stack(node: fx.Node) -> dict[str, tuple[str, Any]]:
    """The calls of modules that an operation is in, outermost first, each with the module's name and type."""
    stack = node.meta.get("nn_module_stack") or {}
    return {key: value for key, value in stack.items() if not key.startswith("_empty")}


def calls_of(node: fx.Node) -> tuple[str, ...]:
    """The calls of modules that an operation is in, outermost first; empty if unknown."""
    return tuple(_stack(node))


def path_of(node: fx.Node, depth: int | None = None) -> str:
    """The name of the innermost module that an operation is in, or of the one at `depth`."""
    names = [name for name, _ in _stack(node).values()]
    return names[-1 if depth is None else min(depth, len(names) - 1)] if names else ""


def unbroken(nodes: Sequence[fx.Node]) -> set[int]:
    """The positions before which no stage may begin.

    These are inside changes in place, where gradients are switched off, and inside of functions such as torch.vmap.
    """
    place = {node: index for index, node in enumerate(nodes)}
    closed: set[int] = set()
    mapped: list[int] = []  # where functions of torch.func begin that have not ended
    for index, node in enumerate(nodes):
        name = getattr(node.target, "__name__", "")
        if name.endswith("_increment_nesting"):
            mapped.append(index)
        elif name.endswith("_decrement_nesting") and mapped:
            closed.update(range(mapped.pop() + 1, index + 1))
        if node.target is switch_gradients and isinstance(node.args[0], fx.Node):
            closed.update(range(place[node.args[0]] + 1, index + 1))
        for changed in written(node):
            base = base_of(changed)
            first = place.get(base, 0)
            if base.op == "placeholder":  # a buffer: all that read it stay together
                users = [place[user] for user in base.users if user in place]
                closed.update(range(min(users, default=index) + 1, max(users, default=index) + 1))
            else:
                closed.update(range(first + 1, index + 1))
    return closed


def find_segments(nodes: Sequence[fx.Node], num_stages: int) -> list[Segment]:
    """Cut a graph into segments; see the top of this file.

    Raises:
        SplitError: there are fewer segments than stages.
    """
    found = segments_for(nodes, num_stages)
    if len(found) < num_stages:
        raise SplitError(
            f"num_stages={num_stages}: the traced model has {len(found)} places between calls of modules, and each "
            f"stage needs one. Use num_stages={len(found)} or fewer."
        )
    return found


def segments_for(nodes: Sequence[fx.Node], num_stages: int) -> list[Segment]:
    """Cut a graph into segments, enough to balance so many stages where the calls of its modules are that many."""
    closed = unbroken(nodes)
    deepest = max((len(calls_of(node)) for node in nodes), default=1)
    found: list[Segment] = []
    for depth in range(1, max(2, deepest)):
        found = _at_depth(nodes, depth, closed)
        if len(found) >= _LEAST * num_stages:
            break
    return found


def _at_depth(nodes: Sequence[fx.Node], depth: int, closed: set[int]) -> list[Segment]:
    segments: list[tuple[str, list[fx.Node]]] = []
    before: tuple[str, ...] | None = None
    for index, node in enumerate(nodes):
        calls = calls_of(node)[: depth + 1] or before
        if not segments or (calls != before and index not in closed):
            segments.append((path_of(node, depth), []))
        segments[-1][1].append(node)
        before = calls
    return [Segment(name, tuple(part)) for name, part in segments]


def modules_begun(nodes: Sequence[fx.Node], segments: Sequence[Segment]) -> list[str | None]:
    """Per segment, the outermost module whose first call begins it: a name for `cut_at`; None: no module does."""
    first: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name, _ in _stack(node).values():
            first.setdefault(name, index)
    closed, found, start = unbroken(nodes), list[str | None](), 0
    for segment in segments:
        names = [name for name, _ in _stack(nodes[start]).values() if name and first[name] == start]
        found.append(names[0] if names and start and start not in closed else None)
        start += len(segment.nodes)
    return found


def cut_at(nodes: Sequence[fx.Node], names: Sequence[str], num_stages: int) -> list[int]:
    """The first positions of the stages after the first, which begin with the first calls of modules `names`.

    Raises:
        SplitError: a module does not run, or not in this order.
    """
    if len(names) != num_stages - 1:
        raise SplitError(f"cut={list(names)}: {num_stages} stages begin at {num_stages - 1} modules after the first.")
    closed, starts = unbroken(nodes), []
    for name in names:
        inside = [index for index, node in enumerate(nodes) if any(each == name for each, _ in _stack(node).values())]
        if not inside:
            raise SplitError(f"cut names {name!r}, which the traced model does not call. Name a module that it calls.")
        if inside[0] in closed:
            raise SplitError(
                f"cut names {name!r}: a value that is made before it is changed in place behind it. Name another one."
            )
        starts.append(inside[0])
    if starts != sorted({*starts}) or (starts and starts[0] == 0):
        raise SplitError(f"cut={list(names)}: must be in the order in which the modules run, none of them first.")
    return starts


def balanced(segments: Sequence[Segment], weights: Sequence[float], num_stages: int) -> list[int]:
    """The first positions of the stages after the first: balanced within a tenth, with the fewest bytes sent."""
    counts = partition(weights, num_stages)
    ends = _running(counts)
    loads = [sum(weights[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    most = max(loads) * 1.1
    sent = _bytes_across(segments)
    totals = [0.0, *_running(weights)]
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(num_stages):
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, (cost, cuts) in best.items():
            for end in range(start + 1, len(segments) + 1):
                if totals[end] - totals[start] > most:
                    break
                if (end == len(segments)) is not (stage == num_stages - 1):
                    continue
                new = (cost + (sent[end] if end < len(segments) else 0.0), (*cuts, end))
                if end not in longer or new < longer[end]:
                    longer[end] = new
        best = longer
    chosen = best[len(segments)][1][:-1] if len(segments) in best else tuple(ends[:-1])
    sizes = [0, *_running([len(segment.nodes) for segment in segments])]
    return [sizes[cut] for cut in chosen]


def _running(values: Iterable[Any]) -> list[Any]:
    total: Any = 0
    return [total := total + value for value in values]


def _bytes_across(segments: Sequence[Segment]) -> list[float]:
    """For each boundary, bytes of the values that cross it."""
    at = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    crossing = [0.0] * (len(segments) + 1)
    for node, made in at.items():
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        last = max((at[user] for user in node.users if user in at), default=made)
        size = float(value.element_size())
        for extent in value.shape:
            size *= extent if isinstance(extent, int) else extent.node.hint or 1
        for boundary in range(made + 1, last + 1):
            crossing[boundary] += size
    return crossing
