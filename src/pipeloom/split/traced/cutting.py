"""Cuts a traced model into stages: their operations, the values between them, and the tensors that they hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves

from pipeloom.errors import SplitError
from pipeloom.split.planned.collected import hooks_installed
from pipeloom.split.traced.buffers import changed_buffers, read_at_home
from pipeloom.split.traced.export import Trace, trace_modes
from pipeloom.split.traced.segments import (
    Segment,
    balanced,
    base_of,
    calls_of,
    cut_at,
    find_segments,
    operations,
    written,
)
from pipeloom.split.traced.stage import Code, Name, Part, TracedStage
from pipeloom.split.traced.timing import measure

Agree = Callable[[list[float]], list[float]]  # times as measured by the first process


@dataclass
class _Flow:
    """Where the values of one mode go.

    Attributes:
        stage_of: the stage of each operation, and of each input.
        chains: per stage, the values in the message to the next stage.
        skips: by value that skips stages, its users.
        trained: values that depend on a parameter.
    """

    stage_of: dict[fx.Node, int]
    chains: list[list[fx.Node]]
    skips: dict[fx.Node, tuple[int, ...]]
    trained: set[fx.Node] = field(default_factory=set)


def traced_stages(
    model: nn.Module, num_stages: int, example: Any, cut: str | Sequence[Any], agree: Agree
) -> tuple[list[nn.Module], list[tuple[str, ...]]]:
    """The stages of a model that torch.export traces, and the names of the modules that each holds.

    Args:
        model: the model.
        num_stages: how many stages.
        example: inputs of one micro-batch.
        cut: "time", "parameters", or names of the modules at which the stages after the first begin.
        agree: the values of the first process, so that all processes cut alike.

    Raises:
        SplitError: the model cannot be traced, or not cut into so many stages.
    """
    if any(isinstance(leaf, PackedSequence) for leaf in tree_leaves(example, lambda x: isinstance(x, PackedSequence))):
        raise SplitError(
            "the example holds a PackedSequence, and a trace takes tensors. Pass an nn.Sequential that packs padded "
            "tensors in a layer: its stages exchange PackedSequences."
        )
    without_values = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if without_values and any(isinstance(leaf, Tensor) and not leaf.is_meta for leaf in tree_leaves(example)):
        raise SplitError(
            f"{type(model).__name__} is on the meta device and the example is not: torch.export runs the model on it. "
            "Give the model values before, or pass an example on the meta device (x.to('meta')) and cut='parameters'."
        )
    with hooks_installed(model):  # transformers would install them in the first forward
        traces = trace_modes(model, example)
    first = operations(traces[True].graph_module.graph)
    starts: list[int] = []
    if num_stages > 1:
        if isinstance(cut, str):
            segments = find_segments(first, num_stages)
            weights = agree(_weights(model, traces[True], segments, example, cut))
            starts = balanced(segments, weights, num_stages)
        else:
            if not all(isinstance(name, str) for name in cut):
                raise SplitError(
                    f"cut={list(cut)}: a traced model is cut at names of modules, where the stages after the first "
                    "begin, such as ['blocks.4', 'blocks.8']. Name them, or use 'time' or 'parameters'."
                )
            starts = cut_at(first, list(cut), num_stages)
    places = _begins(first, starts)
    homes = changed_buffers(traces[True].held, first, starts)
    flows = {}
    for mode, trace in traces.items():
        nodes = operations(trace.graph_module.graph)
        own = starts
        if not mode:
            own = _same_starts(nodes, places, num_stages)
            own = read_at_home(trace.graph_module.graph, trace.held, nodes, own, homes)
        flows[mode] = _flow(model, trace, nodes, own, num_stages)
    return _build(model, traces, flows, num_stages)


def _weights(model: nn.Module, trace: Trace, segments: Sequence[Segment], example: Any, cut: str) -> list[float]:
    if cut == "parameters":
        sizes, seen = [], set[str]()
        for segment in segments:
            names = {n.name for node in segment.nodes for n in node.all_input_nodes if n.name in trace.held} - seen
            seen |= names
            held = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
            sizes.append(float(sum(held.get(trace.held[name], 0) for name in names)))
        return sizes
    if cut != "time":
        raise SplitError(f"cut={cut!r}: a traced model is cut by 'time', by 'parameters', or at names of modules.")
    return [each.forward_seconds + each.backward_seconds for each in measure(model, trace, segments, example)]


def _mark(node: fx.Node) -> tuple[tuple[str, ...], str]:
    return calls_of(node), str(node.target)


def _begins(nodes: Sequence[fx.Node], starts: Sequence[int]) -> list[tuple[Any, int]]:
    """What the first operation of each stage is: its calls and target, and how many like it come before."""
    marks = [_mark(node) for node in nodes]
    return [(marks[start], marks[:start].count(marks[start])) for start in starts]


def _same_starts(nodes: Sequence[fx.Node], places: Sequence[tuple[Any, int]], num_stages: int) -> list[int]:
    """The same cuts in the graph of the other mode, by the call in which each begins."""
    marks = [_mark(node) for node in nodes]
    starts: list[int] = []
    for mark, count in places:
        found = [index for index, each in enumerate(marks) if each == mark]
        if len(found) <= count:
            calls = mark[0]
            found, count = [index for index, each in enumerate(marks) if each[0][: len(calls)] == calls], 0
        start = found[count] if found else len(nodes)
        starts.append(max(start, starts[-1] if starts else 0))
    return starts


def _flow(model: nn.Module, trace: Trace, nodes: list[fx.Node], starts: Sequence[int], num_stages: int) -> _Flow:
    ends = [*starts, len(nodes)]
    stage_of: dict[fx.Node, int] = {}
    for stage, (begin, end) in enumerate(zip([0, *starts], ends, strict=True)):
        stage_of |= dict.fromkeys(nodes[begin:end], stage)
    graph = trace.graph_module.graph
    inputs = {node for node in graph.nodes if node.op == "placeholder" and node.name in trace.inputs}
    stage_of |= dict.fromkeys(inputs, 0)
    for node in reversed(nodes):  # lookups of attributes and sizes of inputs run where they are read first
        if node.op == "get_attr":
            stage_of[node] = min((stage_of[user] for user in node.users if user in stage_of), default=stage_of[node])
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    flow = _Flow(stage_of, [[] for _ in range(num_stages)], {})
    for node in graph.nodes:
        sources = [trace.held.get(each.name) in parameters or each in flow.trained for each in node.all_input_nodes]
        value = node.meta.get("val")
        values = value if isinstance(value, tuple | list) else [value]
        if any(sources) and any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values):
            flow.trained.add(node)
    last = num_stages - 1
    results = set(graph.output_node().all_input_nodes)
    for node, maker in stage_of.items():
        users = {stage_of[user] for user in node.users if user in stage_of} | ({last} if node in results else set())
        later = sorted(user for user in users if user > maker)
        if not later:
            continue
        value = node.meta.get("val")
        if isinstance(value, Tensor | tuple | list):
            if later[0] == maker + 1:
                flow.chains[maker].append(node)
            if rest := tuple(user for user in later if user > maker + 1):
                flow.skips[node] = rest
        else:  # sizes go along with the messages of all stages in between
            for stage in range(maker, later[-1]):
                flow.chains[stage].append(node)
    return flow


def _build(
    model: nn.Module, traces: Mapping[bool, Trace], flows: Mapping[bool, _Flow], num_stages: int
) -> tuple[list[nn.Module], list[tuple[str, ...]]]:
    names: dict[tuple[str, int], str] = {}  # of skipping values, by node and maker
    for mode in (True, False):
        for node in flows[mode].skips:
            place = node.name, flows[mode].stage_of[node]
            taken = {name for other, name in names.items() if other != place}
            names.setdefault(place, node.name if node.name not in taken else f"{node.name}~{place[1]}")
    stages: list[nn.Module] = []
    calls: list[tuple[str, ...]] = []
    homes = _homes(model, traces, flows, num_stages)
    for stage in range(num_stages):
        parts, stashes, pops, trained = {}, dict[str, None](), dict[str, None](), set[str]()
        for mode in (True, False):
            flow, trace = flows[mode], traces[mode]
            own = [node for node in trace.graph_module.graph.nodes if flow.stage_of.get(node) == stage]
            stash = {names[n.name, stage]: n.name for n in flow.skips if flow.stage_of[n] == stage}
            pop = {names[n.name, flow.stage_of[n]]: n.name for n, users in flow.skips.items() if stage in users}
            trained |= {names[n.name, stage] for n in flow.skips if flow.stage_of[n] == stage and n in flow.trained}
            stashes |= dict.fromkeys(stash)
            pops |= dict.fromkeys(pop)
            parts[mode] = _part(trace, flow, own, stage, num_stages, homes[stage], stash, pop)
        modules, tensors = _holdings(model, traces, homes[stage])
        stages.append(
            TracedStage(
                modules,
                tensors,
                parts,
                stashes=tuple(stashes),
                pops=tuple(pops),
                without_gradient=tuple(name for name in stashes if name not in trained),
            )
        )
        calls.append(tuple(name for name, _ in stages[-1].named_children()) or ("",))
    for stage_module in stages:
        stage_module.training = model.training
    return stages, calls


def _part(
    trace: Trace,
    flow: _Flow,
    own: Sequence[fx.Node],
    stage: int,
    num_stages: int,
    homes: Mapping[str, str],
    stash: Mapping[str, str],
    pop: Mapping[str, str],
) -> Part:
    nodes = [node for node in own if node.op != "placeholder"]
    inside = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    held = [source for source in sources if source.name in trace.held]
    reads = [source for source in sources if source.name not in trace.held]
    results = set(trace.graph_module.graph.output_node().all_input_nodes)
    wanted = {*flow.chains[stage], *(results if stage == num_stages - 1 else ())}
    makes = [node for node in nodes if node in wanted or node.name in stash.values()]
    first, last = stage == 0, stage == num_stages - 1
    arrives = trace.inputs if first else tuple(node.name for node in flow.chains[stage - 1])
    leaves: tuple[Any, ...] = tuple(Name(node.name) for node in flow.chains[stage])
    if last:
        flat, _ = tree_flatten(trace.graph_module.graph.output_node().args[0])
        leaves = tuple(Name(leaf.name, _is_number(leaf)) if isinstance(leaf, fx.Node) else leaf for leaf in flat)
    changes = {node for each in nodes for node in written(each)}
    changed = {node for node in changes if node in reads}
    lasting = {base_of(node) for node in changes}.intersection(held)
    views = {node for node in makes if base_of(node) in lasting}
    return Part(
        function=Code(nodes, [*held, *reads], makes, trace.graph_module, changed, views),
        held=tuple(homes[trace.held[node.name]] for node in held),
        reads=tuple(node.name for node in reads),
        makes=tuple(node.name for node in makes),
        arrives=tuple(arrives),
        leaves=leaves,
        pops=dict(pop),
        stashes=dict(stash),
        rules=trace.rules if first else None,
        outputs=trace.outputs if last else None,
    )


def _is_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and not value.dim()


def _homes(
    model: nn.Module, traces: Mapping[bool, Trace], flows: Mapping[bool, _Flow], num_stages: int
) -> list[dict[str, str]]:
    """Per stage: the name in the trace of each tensor that it holds -> the name under which it holds it.

    A tensor that no operation reads goes to the first stage. Every other name of a tied tensor stays with its module.
    """
    homes: list[dict[str, str]] = [{} for _ in range(num_stages)]
    for mode, trace in traces.items():
        stage_of = flows[mode].stage_of
        results = set(trace.graph_module.graph.output_node().all_input_nodes)
        for node in trace.graph_module.graph.nodes:
            if node.op == "placeholder" and node.name in trace.held:
                target = trace.held[node.name]
                if node in results:
                    raise SplitError(f"the model returns its own tensor {target!r}. Return a value computed from it.")
                for user in node.users:
                    if user in stage_of:
                        homes[stage_of[user]][target] = target
    known: dict[int, list[str]] = {}
    for named in (model.named_parameters, model.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            known.setdefault(id(tensor), []).append(name)
    for aliases in known.values():
        at = [stage for stage in range(num_stages) if any(name in homes[stage] for name in aliases)]
        for name in aliases:
            if not any(name in homes[stage] for stage in at):
                homes[at[-1] if at else 0][name] = name
    return homes


def _holdings(
    model: nn.Module, traces: Mapping[bool, Trace], names: Mapping[str, str]
) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, Tensor, bool]]]:
    """The modules that a stage holds as a whole, and the tensors of other modules, each with its name."""
    by_owner: dict[str, list[str]] = {}
    constants = traces[True].constants | traces[False].constants
    everything: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    everything |= dict(model.named_buffers(remove_duplicate=False))
    modules: list[tuple[str, nn.Module]] = []
    tensors: list[tuple[str, Tensor, bool]] = []
    for name in names.values():
        if name in everything:
            by_owner.setdefault(name.rpartition(".")[0], []).append(name)
        else:
            tensors.append((name, constants[name].clone(), False))
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    for owner, held in sorted(by_owner.items(), key=lambda item: order[item[0]]):
        module = model.get_submodule(owner)
        own = {key for key, value in (*module._parameters.items(), *module._buffers.items()) if value is not None}
        if owner and not module._modules and own == {name.rpartition(".")[2] for name in held}:
            modules.append((owner, module))
            continue
        for name in held:
            key = name.rpartition(".")[2]
            tensors.append((name, everything[name], key not in module._non_persistent_buffers_set))
    return modules, tensors
