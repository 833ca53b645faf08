"""Regions of a trace with gradients switched on or off, as plain operations between two switches.

torch.export makes a function of the operations in ``with torch.no_grad():``, which hides what they change: buffers that
a forward updates there.
"""

import operator
from typing import Any

import torch
from torch import fx

from pipeloom.errors import SplitError


def switch_gradients(enabled: bool) -> bool:
    """Switch gradients on or off; returns what they were."""
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(enabled)
    return before


def inline_regions(module: fx.GraphModule) -> None:
    """Put the operations of each region into the graph, which is changed."""
    graph = module.graph
    for node in list(graph.nodes):
        if getattr(node.target, "_name", "") != "wrap_with_set_grad_enabled":
            continue
        enabled, body, *operands = node.args
        inner = getattr(module, body.target)
        if any(user.target is not operator.getitem for user in node.users):
            continue
        inline_regions(inner)
        with graph.inserting_before(node):
            before = graph.call_function(switch_gradients, (enabled,))
            results = _copied(graph, module, inner, body.target, operands)
            after = graph.call_function(switch_gradients, (before,))
        for switch in (before, after):
            switch.meta = {"nn_module_stack": node.meta.get("nn_module_stack")}
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        if not body.users:
            graph.erase_node(body)


def _copied(graph: fx.Graph, module: fx.GraphModule, inner: fx.GraphModule, name: str, operands: list[Any]) -> Any:
    """Copies of the operations of `inner` where the graph is written; returns its results."""
    copies: dict[fx.Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), operands, strict=True))
    for node in inner.graph.nodes:
        if node.op == "get_attr":
            key = f"{name}_{node.target}".replace(".", "_")
            setattr(module, key, getattr(inner, node.target))
            copies[node] = graph.get_attr(key)
            copies[node].meta = dict(node.meta)
        elif node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.node.map_arg(inner.graph.output_node().args[0], copies.__getitem__)


def check_other_regions(model: torch.nn.Module, module: fx.GraphModule, written: Any) -> None:
    """Raises SplitError where a function in the graph, such as of an autocast, changes what it is given.

    Args:
        model: for messages.
        module: has the graph.
        written: returns the arguments that an operation changes in place.
    """
    for node in module.graph.nodes:
        inside = [getattr(module, each.target, None) for each in node.all_input_nodes if each.op == "get_attr"]
        for inner in (each for each in inside if isinstance(each, fx.GraphModule)):
            given = set(inner.graph.find_nodes(op="placeholder"))
            if any(given.intersection(written(each)) for each in inner.graph.nodes):
                raise SplitError(
                    f"{type(model).__name__} changes a buffer inside of {getattr(node.target, '_name', node.target)}, "
                    "where stages do not see it. Change the buffer outside of it, or name the layers with layers=."
                )
