"""Measures the segments of a traced graph, and profiles a model as a graph of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from pipeloom.split.chain_partition import Tie, find_ties
from pipeloom.split.kept_bytes import KeptStorages
from pipeloom.split.profile import Clock, LayerTime, untouched
from pipeloom.split.traced.export import Trace, tensors_of, trace_modes
from pipeloom.split.traced.segments import Segment, find_segments, operations


class SegmentTime(NamedTuple):
    """One segment on one micro-batch.

    Attributes:
        forward_seconds, backward_seconds: medians.
        sent_bytes: of the values that later segments read; of the last segment, of its last value.
        across_bytes: of all values made so far that later segments read.
        kept_bytes: what its forward keeps for its backward, without parameters and buffers.
    """

    forward_seconds: float
    backward_seconds: float
    sent_bytes: int
    across_bytes: int
    kept_bytes: int


def measure(
    model: nn.Module, trace: Trace, segments: Sequence[Segment], example: Any, num_rounds: int = 3
) -> list[SegmentTime]:
    """Run every segment forward and backward; the model keeps its buffers and the random state.

    Args:
        model: the traced model.
        trace: its graph.
        segments: in order.
        example: inputs of one micro-batch.
        num_rounds: rounds whose median is taken, after one that is discarded.
    """
    tensors, clock = tensors_of(model, trace.constants), Clock([model], example, None)
    training = model.training

    def run(node: fx.Node, args: Any, kwargs: Any) -> Any:
        if node.op == "get_attr":
            return getattr(trace.graph_module, str(node.target))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    with untouched([model], clock.cuda):
        leaves, _ = trace.rules.signature.leaves(example)
        known = {name: tensors[target] for name, target in trace.held.items()}
        known |= dict(zip(trace.inputs, leaves, strict=True))
        found = _measure(segments, known, trace, run, clock, num_rounds)
    assert model.training is training
    return found


def _measure(
    segments: Sequence[Segment],
    known: Mapping[str, Any],
    trace: Trace,
    run: Callable[[fx.Node, Any, Any], Any],
    clock: Callable[[], float],
    num_rounds: int,
) -> list[SegmentTime]:
    """`known` has the values of the placeholders. The model may change its inputs in place."""
    values: dict[str, Any] = dict(known)
    last_use = _last_uses(segments)
    across: dict[fx.Node, int] = {}  # bytes of the values that later segments read
    found = []
    for index, segment in enumerate(segments):
        times = []
        kept = KeptStorages(known[name] for name in trace.held if isinstance(known[name], Tensor))
        for number in range(num_rounds + 1):
            own = values | {name: values[name].clone() for name in trace.inputs if isinstance(values[name], Tensor)}
            sources = [t for t in known.values() if isinstance(t, Tensor) and t.requires_grad]
            read = {source.name for node in segment.nodes for source in node.all_input_nodes} - {*known}
            for name in read & values.keys():
                if isinstance(values[name], Tensor) and values[name].is_floating_point():
                    leaf = values[name].detach().requires_grad_()
                    sources.append(leaf)
                    own[name] = leaf.clone()
            begun = clock()
            with nullcontext() if number else kept:  # the first round is not timed
                for node in segment.nodes:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _looked_up(own))
                    own[node.name] = run(node, args, kwargs)
            forwarded = clock()
            ends = [own[node.name] for node in segment.nodes if last_use.get(node, -1) > index]
            ends = ends or [own[segment.nodes[-1].name]]
            roots = [end for end in ends if isinstance(end, Tensor) and end.requires_grad]
            if roots and sources:
                torch.autograd.grad(roots, sources, [torch.ones_like(root) for root in roots], allow_unused=True)
            times.append((forwarded - begun, clock() - forwarded))
        forward, backward = (median(each) for each in zip(*times[1:], strict=True))
        sent = sum(end.nbytes for end in ends if isinstance(end, Tensor))
        made = {node: own[node.name] for node in segment.nodes}
        across |= {node: value.nbytes for node, value in made.items() if isinstance(value, Tensor)}
        across = {node: size for node, size in across.items() if last_use.get(node, -1) > index}
        found.append(SegmentTime(forward, backward, sent, sum(across.values()), kept.nbytes))
        values |= {
            node.name: own[node.name].detach() if isinstance(own[node.name], Tensor) else own[node.name]
            for node in segment.nodes
        }
    return found


def _last_uses(segments: Sequence[Segment]) -> dict[fx.Node, int]:
    """The last segment that reads each value."""
    found: dict[fx.Node, int] = {}
    for index, segment in enumerate(segments):
        for node in segment.nodes:
            found |= dict.fromkeys(node.all_input_nodes, index)
    return found


def _looked_up(values: Mapping[str, Any]) -> Callable[[fx.Node], Any]:
    return lambda node: values[node.name]


def profile_graph(
    model: nn.Module, example: Any, *, num_stages: int = 2, num_rounds: int = 5
) -> tuple[list[LayerTime], list[Tie], list[tuple[int, int]]]:
    """Measure a model that torch.export traces, as a graph of calls of modules.

    Args:
        model: the model.
        example: inputs of one micro-batch: ``(args, kwargs)``, a tuple, a dict, or the only argument.
        num_stages: the most stages to plan for. Calls are those of the outermost modules, or of modules inside, so that
            there are three or more of them per stage.
        num_rounds: rounds whose median is reported.

    Returns:
        Times and sizes of the calls in order, the bytes of parameters that several of them share, and the pairs of a
        call and a later one that reads its output. With ``rows, ties, edges = profile_graph(...)``,
        ``Profile.of(rows, ties, edges=edges)`` is the input of `pipeloom.plan.partition`. The loss is not measured.

    Raises:
        SplitError: the model cannot be traced, is on the meta device, or has fewer calls than stages.
    """
    trace = trace_modes(model, example)[model.training]
    segments = find_segments(operations(trace.graph_module.graph), num_stages)
    times = measure(model, trace, segments, example, num_rounds)
    home = {node: index for index, segment in enumerate(segments) for node in segment.nodes}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    edges: set[tuple[int, int]] = set()
    held: list[dict[int, int]] = [{} for _ in segments]
    for node, index in home.items():
        for source in node.all_input_nodes:
            if home.get(source, index) != index:
                edges.add((home[source], index))
            parameter = parameters.get(trace.held.get(source.name, ""))
            if parameter is not None:
                held[index][id(parameter)] = parameter.nbytes
    rows = [
        LayerTime(
            segment.name or type(model).__name__,
            each.forward_seconds,
            each.backward_seconds,
            each.sent_bytes,
            sum(sizes.values()),
        )
        for segment, each, sizes in zip(segments, times, held, strict=True)
    ]
    return rows, find_ties(held), sorted(edges)
