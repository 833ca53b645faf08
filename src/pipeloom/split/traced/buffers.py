"""Buffers that a forward changes: one stage has each, and sends copies, which the next micro-batch does not change."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set

import torch
from torch import fx

from pipeloom.errors import SplitError
from pipeloom.split.traced.segments import base_of, written


def settle_buffers(graph: fx.Graph, buffers: Set[str]) -> None:
    """Rewrite the operations of a trace so that a changed buffer is read at the time of its change alone.

    torch.export assigns buffers (``self.n = self.n + 1``) at the end of the graph, and reads those that were changed in
    place (``self.n += 1``) wherever the forward does. Both would keep all operations in between on one stage, and give
    later stages and backwards a tensor that the next micro-batch changes.

    Args:
        graph: changed.
        buffers: their placeholders.
    """
    place = {node: index for index, node in enumerate(graph.nodes)}
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for base in {base_of(changed) for changed in written(node)}:
            if base.op == "placeholder" and base.name in buffers:
                writers.setdefault(base, []).append(node)
    for base, found in writers.items():
        first = place[found[0]]
        _copy_for(graph, base, [user for user in base.users if place[user] < first], before=True)
        for node in found:
            if base in written(node):
                _copy_for(graph, node, list(node.users), before=False)
        for earlier, node in zip([None, *found], found, strict=False):
            source = node.args[1] if node.target is torch.ops.aten.copy_.default and not node.users else None
            if not isinstance(source, fx.Node):
                continue
            if source.target is torch.ops.aten.clone.default and source.args[0] is earlier:
                graph.erase_node(node)  # it was changed in place
            elif all(user is node or place.get(user, 0) <= place.get(source, 0) for user in base.users):
                source.append(node)
                node.meta["nn_module_stack"] = source.meta.get("nn_module_stack")


def _copy_for(graph: fx.Graph, node: fx.Node, users: Sequence[fx.Node], *, before: bool) -> None:
    """Give the users that read a value, and do not change or view it, a copy of it."""
    readers = [user for user in users if node not in written(user) and base_of(user) is user]
    if not readers:
        return
    with graph.inserting_before(readers[0]) if before else graph.inserting_after(node):
        copy = graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(readers[0].meta if before else node.meta)
    for user in readers:
        user.replace_input_with(node, copy)


def changed_buffers(held: Mapping[str, str], nodes: Sequence[fx.Node], starts: Sequence[int]) -> dict[str, int]:
    """By name, the stage of the buffers that operations change.

    Args:
        held: names of the buffers and parameters by placeholder.
        nodes: the operations.
        starts: where the stages after the first begin.

    Raises:
        SplitError: other stages read or change one of them: one stage has it.
    """
    stage_of = {node: bisect_right(starts, index) for index, node in enumerate(nodes)}
    homes: dict[str, int] = {}
    for node in nodes:
        for base in {base_of(changed) for changed in written(node)}:
            if base.op != "placeholder" or base.name not in held:
                continue
            stages = {stage_of[user] for user in base.users if user in stage_of} | {stage_of[node]}
            name = held[base.name]
            stages |= {homes.setdefault(name, stage_of[node])}
            if len(stages) > 1:
                raise SplitError(
                    f"stages {' and '.join(map(str, sorted(stages)))} would use {name!r}, a buffer that the forward "
                    "changes and one stage has. Cut the model elsewhere (cut=), use a buffer for each place, or fewer "
                    "stages."
                )
    return homes


def read_at_home(
    graph: fx.Graph, held: Mapping[str, str], nodes: list[fx.Node], starts: list[int], homes: Mapping[str, int]
) -> list[int]:
    """Let stages of an evaluation receive the buffers that training changes on other stages, of which they have none.

    Args:
        graph: of the evaluation.
        held: names of the buffers and parameters by placeholder.
        nodes: its operations; changed.
        starts: where the stages after the first begin.
        homes: by name, the stages that have these buffers.

    Returns:
        Where the stages after the first begin now.
    """
    for base in [node for node in graph.nodes if node.op == "placeholder" and held.get(node.name) in homes]:
        home = homes[held[base.name]]
        begin = [0, *starts][home]
        others = [
            nodes[i] for i in range(len(nodes)) if base in nodes[i].all_input_nodes and bisect_right(starts, i) != home
        ]
        if not others or begin == len(nodes):
            continue
        with graph.inserting_before(nodes[begin]):
            copy = graph.call_function(torch.ops.aten.clone.default, (base,))
        copy.meta = {**nodes[begin].meta, "val": base.meta.get("val")}
        for user in others:
            user.replace_input_with(base, copy)
        nodes.insert(begin, copy)
        starts = [start + (index >= home) for index, start in enumerate(starts)]
    return starts
