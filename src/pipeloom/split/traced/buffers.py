"""Buffers that a forward changes: reads after the change get a copy, which the next micro-batch does not change."""

from collections.abc import Sequence, Set

import torch
from torch import fx

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
