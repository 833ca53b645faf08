"""Reads the text format in which PipeDream's authors publish profiles, one layer or edge per line.

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, backward_compute_time=6.949, ...
    node5 -- LSTM(1024, 1024) -- ..., activation_size=[6291456.0; 131072.0], parameter_size=50364416.000
        node4 -- node5

A layer has four numbers: `forward_compute_time` and `backward_compute_time` in milliseconds, `activation_size` and
`parameter_size` in bytes, in this order. A list has the sizes of several outputs; ``-- stage_id=N`` may follow. As in
the authors' optimizer, layers named ``Input...`` without inputs are left out, since a model's inputs are no part of
the partition, and so are selections of an output, ``__getitem__(N)``, that nothing reads.
"""

import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import NoReturn

from pipeloom.errors import InputError, folded, shortened
from pipeloom.plan.partition.profile import LayerProfile, Profile, parse_profile

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = r"\[?[-+.;\w\s]*\]?"
_LAYER = re.compile(r"(\S+) -- (.*) -- " + ", ".join(rf"{key}=({_NUMBER})" for key in _KEYS) + r"( -- stage_id=\d+)?")
_EDGE = re.compile(r"(\S+) -- (\S+)")
_FORM = "node1 -- NAME -- " + ", ".join(f"{key}=0.5" for key in _KEYS)


def is_graph_text(text: str) -> bool:
    """Whether a text has this format, and not that of a JSON file."""
    return f"{_KEYS[0]}=" in text and not text.lstrip().startswith("{")


def parse_profile_file(text: str) -> Profile:
    """The layers of a profile file of either format. Raises InputError as `parse_graph` and `parse_profile`."""
    return parse_graph(text) if is_graph_text(text) else parse_profile(text)


def parse_graph(text: str) -> Profile:
    """The layers in an order in which every edge leads to a later layer, with their edges.

    Raises:
        InputError: a line of another form, an unknown layer, or a cycle.
    """
    layers: dict[str, LayerProfile] = {}
    pairs: list[tuple[int, str, str]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if layer := _LAYER.fullmatch(line.strip()):
            key, name, *values = layer.groups()[:-1]
            if key in layers:
                _refuse(number, f"the second layer {key}: each needs a name of its own")
            forward, backward, sent, kept = (_number(value, number) for value in values)
            layers[key] = LayerProfile(name, forward / 1000, backward / 1000, sent, kept)
        elif edge := _EDGE.fullmatch(line.strip()):
            pairs.append((number, edge[1], edge[2]))
        else:
            _refuse(number, f"{folded(line.strip())}: must be a layer such as '{_FORM}', or an edge 'node1 -- node2'")
    for number, *ends in pairs:
        for end in ends:
            if end not in layers:
                _refuse(number, f"the edge names {end}, which has no line of its own")
    kept_layers, edges = _without_inputs(layers, [(source, target) for _, source, target in pairs])
    order = _in_order(kept_layers, edges)
    at = {key: place for place, key in enumerate(order)}
    found = sorted({(at[source], at[target]) for source, target in edges})
    return Profile(tuple(layers[key] for key in order), edges=tuple(found))


def _number(text: str, line: int) -> float:
    """A number, or the sum of a list of numbers."""
    try:
        return sum(float(part) for part in text.strip().removeprefix("[").removesuffix("]").split(";"))
    except ValueError:
        _refuse(line, f"{text!r} must be a number, or a list such as [8.0; 4.0]")


def _without_inputs(
    layers: dict[str, LayerProfile], edges: list[tuple[str, str]]
) -> tuple[list[str], list[tuple[str, str]]]:
    targets, sources = {target for _, target in edges}, {source for source, _ in edges}
    out = {key for key, layer in layers.items() if layer.name.startswith("Input") and key not in targets}
    out |= {key for key, layer in layers.items() if layer.name.startswith("__getitem__") and key not in sources}
    if len(out) == len(layers):
        raise InputError("the profile: only inputs, no layers. Profile the model again.")
    return [key for key in layers if key not in out], [pair for pair in edges if not out & {*pair}]


def _in_order(layers: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[str]:
    """The order of the file, where edges allow it."""
    needs: dict[str, list[str]] = {key: [] for key in layers}
    for source, target in edges:
        needs[target].append(source)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        around = " -- ".join(error.args[1])
        raise InputError(f"the profile: edges lead around: {shortened(around, 60)}. Remove one of them.") from error
    found: dict[str, None] = {}
    waiting = [*reversed(needs)]
    while waiting:
        key = waiting[-1]
        missing = [each for each in needs[key] if each not in found]
        if missing:
            waiting += reversed(missing)
        else:
            found[waiting.pop()] = None
    return list(found)


def _refuse(line: int, what: str) -> NoReturn:
    raise InputError(f"the profile: line {line}: {what}. Correct the line.")
