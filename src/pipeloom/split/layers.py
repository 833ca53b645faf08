"""Finds the layers of a model and assigns them to stages."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import nn

from pipeloom.common.quantities import counted
from pipeloom.errors import SplitError
from pipeloom.split.chain_partition import find_ties, partition
from pipeloom.split.profile import LossFn, profile_layers

_CUTS = "must be 'layers', 'parameters', 'time' or a list of integers (layers per stage)."


class ChainLayer(NamedTuple):
    """A layer in the chain that is split into stages.

    Attributes:
        name: its fully qualified name.
        module: the module.
        counted: whether ``cut="layers"`` counts it, as it does for all layers that a ``*`` matched.
    """

    name: str
    module: nn.Module
    counted: bool


def find_layers(model: nn.Module, patterns: Sequence[str] | None) -> list[ChainLayer]:
    """The layers of `model` in execution order; for `patterns`, see `layers` of `split`.

    Raises:
        SplitError: the layers of the model are unknown, or a pattern matches no module or an invalid one.
    """
    if hasattr(model, "_orig_mod"):
        raise SplitError("a model compiled as a whole cannot be split into stages. Compile its blocks instead.")
    if patterns is None:
        patterns = getattr(model, "pipeline_layers", None)
    if patterns is None:
        if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
            if not len(model):
                raise SplitError("the nn.Sequential is empty: a model needs at least one layer.")
            return [ChainLayer(name, module, True) for name, module in _children(model)]
        problem = "has no submodules: only a chain of modules can be split. Use num_stages=1."
        if _children(model):
            problem = "is not a plain nn.Sequential: the execution order of its submodules is unknown. "
            problem += f"Pass it, for example layers={_suggest(model)}, or trace the model: pass inputs as example=."
        raise SplitError(f"{type(model).__name__} {problem}")
    if isinstance(patterns, str):
        patterns = [patterns]
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SplitError(f"layers={patterns!r}: must be a list of module names, such as {_suggest(model)}.")
    layers = [layer for pattern in patterns for layer in _expand(model, pattern)]
    _check_layers(model, patterns, layers)
    if not any(layer.counted for layer in layers):  # no pattern has a *: count each layer
        layers = [layer._replace(counted=True) for layer in layers]
    return layers


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Like ``named_children``, but lists a module once per name."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _suggest(model: nn.Module) -> list[str]:
    lists = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return [f"{name}.*" if isinstance(child, lists) else name for name, child in _children(model)]


def _expand(model: nn.Module, pattern: str) -> list[ChainLayer]:
    matches: list[tuple[str, nn.Module]] = [("", model)]
    for part in pattern.split("."):
        found = []
        for prefix, parent in matches:
            dot = f"{prefix}." if prefix else ""
            if part == "*":
                found += [(dot + name, child) for name, child in _children(parent)]
            elif (child := parent._modules.get(part)) is not None:
                found.append((dot + part, child))
            else:
                names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
                near = get_close_matches(pattern, names + [f"{name}.*" for name in names], n=1, cutoff=0.4)
                raise SplitError(
                    f"layer {pattern!r}: {type(model).__name__} has no module {dot + part!r}. "
                    + (f"Did you mean {near[0]!r}?" if near else f"Its modules are {[n for n, _ in _children(model)]}.")
                )
        matches = found
    if not matches:
        raise SplitError(f"layer {pattern!r} matches an empty list of modules. Remove it from layers.")
    return [ChainLayer(name, module, "*" in pattern) for name, module in matches]


def _check_layers(model: nn.Module, patterns: Sequence[str], layers: list[ChainLayer]) -> None:
    if not layers:
        raise SplitError("layers=[]: a model needs at least one layer. List the layers in execution order.")
    names = Counter(layer.name for layer in layers)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        matching = [
            repr(pattern) for pattern in patterns if any(name == twice for name, _, _ in _expand(model, pattern))
        ]
        raise SplitError(
            f"layer {twice!r} is listed twice, by {' and '.join(matching)}. Remove one of them. To run a module twice, "
            "pass a list of modules, one per stage."
        )
    for name, module, _ in layers:
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            kind = type(module).__name__
            raise SplitError(f"layer {name!r} is a {kind}, which has no forward. List its members: '{name}.*'.")
        outer = next((other for other in sorted(names) if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise SplitError(
                f"layer {name!r} is inside layer {outer!r} and would run twice. Remove {name!r} or {outer!r}."
            )


def check_complete(
    model: nn.Module, layers: Sequence[ChainLayer], replicated: Sequence[str] = (), *, runs_others: bool = False
) -> None:
    """Check that the layers hold all parameters and persistent buffers, and warn of other modules that will not run.

    Args:
        model: the whole model.
        layers: all of its layers.
        replicated: names of modules without parameters that every stage runs in addition to its layers.
        runs_others: whether stages run all other modules without parameters.

    Raises:
        SplitError: a parameter or persistent buffer is in no layer.
    """
    inside = {id(module) for layer in layers for module in layer.module.modules()}
    kept = {id(tensor) for layer in layers for _, tensor in _saved_tensors(layer.module)}
    missing = [name for name, tensor in _saved_tensors(model) if id(tensor) not in kept]
    if missing:
        homes = sorted({name.rpartition(".")[0] for name in missing})
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        fixes = [f"Add {[home for home in homes if home]} to layers"] if homes != [""] else []
        if of_model := [name for name in missing if "." not in name]:
            move = "and move" if fixes else "Move"
            fixes.append(f"{move} {', '.join(map(repr, of_model))} into a submodule that is in layers")
        raise SplitError(
            f"{', '.join(map(repr, missing[:3]))}{more} would be in no stage: no layer holds it. {' '.join(fixes)}."
        )
    if runs_others:
        return
    outer = {".".join(layer.name.split(".")[:i]) for layer in layers for i in range(layer.name.count(".") + 1)}
    for name, module in model.named_modules():
        if id(module) not in inside and name not in (*outer, *replicated) and not list(module.children()):
            warnings.warn(f"{name!r} ({type(module).__name__}) is in no layer and will not run.", stacklevel=3)


def check_memory(parameters: Iterable[tuple[str, nn.Parameter, Sequence[int]]]) -> None:
    """Check that parameters of different stages do not share memory, since their updates would differ.

    Args:
        parameters: each parameter once: its name, itself, and the stages that hold it.

    Raises:
        SplitError: two parameters are over one memory, in different stages.
    """
    spans = []
    for name, parameter, stages in parameters:
        is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_meta
        if is_plain and parameter.numel() and parameter.data_ptr():  # one of freed memory has none
            last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride(), strict=True))
            start = parameter.data_ptr()
            end = start + (last + 1) * parameter.element_size()
            spans.append(((str(parameter.device), start), end, name, list(stages)))
    for (here, end, name, stages), (there, _, other, others) in pairwise(sorted(spans)):
        if here[0] == there[0] and there[1] < end and (stages != others or len(stages) > 1):
            places = " and ".join(map(str, sorted({*stages, *others})))
            raise SplitError(
                f"{name!r} and {other!r} are two parameters over one memory, in stages {places}: "
                "an update of one would not reach the other. Make them one nn.Parameter, so that they are tied, or "
                "give each its own memory with clone()."
            )


def _saved_tensors(module: nn.Module) -> list[tuple[str, Any]]:
    """Parameters and persistent buffers with their names."""
    buffers = [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]
    return [*module.named_parameters(), *buffers]


def count_layers(
    layers: Sequence[ChainLayer],
    num_stages: int,
    cut: str | Sequence[int],
    sample: Any,
    loss_fn: LossFn | None,
    make_stage: Callable[[Sequence[ChainLayer]], nn.Module],
) -> list[int]:
    """The number of consecutive layers per stage; for the arguments, see `split`.

    With ``cut="time"``, each layer is measured as a stage made by `make_stage`.

    Raises:
        SplitError: `cut` is invalid, or a stage would have no layer.
    """
    if num_stages > len(layers):
        num_blocks = sum(layer.counted for layer in layers)
        raise SplitError(
            f"num_stages={num_stages}: the model has {len(layers)} layers ({num_blocks} of them blocks), and each "
            f"stage needs at least one. Use num_stages={len(layers)} or fewer."
        )
    blocks = [float(layer.counted) for layer in layers]
    if not isinstance(cut, str):
        if not isinstance(cut, Iterable) or not all(isinstance(count, SupportsIndex) for count in cut):
            raise SplitError(f"cut={cut!r}: {_CUTS}")
        return _explicit_counts(layers, num_stages, [int(count) for count in cut])
    if cut == "layers":
        return partition(blocks, num_stages)
    if cut == "parameters":
        sizes = [{id(p): p.numel() for p in layer.module.parameters()} for layer in layers]
        return partition([sum(each.values()) for each in sizes], num_stages, find_ties(sizes))
    if cut == "time":
        if sample is None:
            raise SplitError("cut='time' measures the layers on a sample input. Pass sample=.")
        times = profile_layers([(layer.name, make_stage([layer])) for layer in layers], sample, loss_fn=loss_fn)
        return partition([t.forward_seconds + t.backward_seconds for t in times], num_stages)
    raise SplitError(f"cut={cut!r}: {_CUTS}")


def _explicit_counts(layers: Sequence[ChainLayer], num_stages: int, cut: list[int]) -> list[int]:
    """Layers per stage from a user's list, which counts layers or, if it adds up to their number, blocks."""
    blocks = [index for index, layer in enumerate(layers) if layer.counted]
    if len(cut) == num_stages and sum(cut) == len(layers) and min(cut) > 0:
        return cut
    counts: list[int] = []
    if len(cut) == num_stages and sum(cut) == len(blocks) and min(cut) >= 0:
        # Layers after a block go to the later stage.
        ends = [blocks[done - 1] + 1 if done else blocks[0] for done in accumulate(cut[:-1])]
        counts = [end - start for start, end in zip([0, *ends], [*ends, len(layers)], strict=True)]
    if not counts or min(counts) < 1:
        rule, found = f"is for {counted(len(cut), 'stage')} and {sum(cut)} layers or blocks", counts or cut
        if len(cut) == num_stages and sum(cut) in (len(blocks), len(layers)):
            rule = f"leaves stage {found.index(min(found))} without a layer"
        which = "each of which counts" if len(blocks) == len(layers) else f"{len(blocks)} of them blocks"
        fix = partition([1.0] * len(blocks), min(num_stages, len(blocks)))
        raise SplitError(
            f"cut={cut}: {rule}. There are {counted(num_stages, 'stage')}, and the model has "
            f"{counted(len(layers), 'layer')}, {which}. Use a cut or plan made for this model, such as cut={fix}."
        )
    return counts
