"""Measures the layers of a model on micro-batches of two sizes: times, bytes, and the shapes of parameters.

The layers of a model that is traced are the calls of its modules.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import InputError
from pipeloom.split.kept_bytes import KeptStorages, fresh
from pipeloom.split.profile import (
    Clock,
    InputBackward,
    LossFn,
    loss_alone,
    profile_halves,
    profile_layers,
    time_once,
    untouched,
)
from pipeloom.split.stages import single_layers

_PLACE, _NUMBER = re.compile(r"\(\d+\):"), re.compile(r"\d+")  # in the text of a module, in a name
_NOISE = 1.3  # the most by which times of equal layers differ from their median, either way


class LayerRow(NamedTuple):
    """A layer on one micro-batch: seconds, and bytes of its input, of its output, and kept by its forward.

    `inputs`, `weights`: seconds of I and W, by themselves or as halves of the backward.
    """

    forward: float
    backward: float
    inputs: float
    weights: float
    received: float
    sent: float
    kept: float


class MeasuredLayer(NamedTuple):
    """One layer.

    Attributes:
        name: fully qualified.
        counted: whether a cut counts it.
        rows: by samples.
        parameters: shapes by name; layers that share a parameter name it alike.
        buffer_elements: elements of buffers.
        dtypes: of its floating-point parameters.
    """

    name: str
    counted: bool
    rows: Mapping[int, LayerRow]
    parameters: Mapping[str, tuple[int, ...]]
    buffer_elements: int
    dtypes: frozenset[str]


def samples_of(example: Any) -> int:
    """Samples of an example: the first dimension of its first tensor. Raises InputError where it has none."""
    for leaf in tree_leaves(example):
        if isinstance(leaf, Tensor) and leaf.dim():
            if not leaf.shape[0]:
                raise InputError("example: has 0 samples. Pass the inputs of one micro-batch.")
            return int(leaf.shape[0])
    raise InputError("example: has no tensor whose first dimension is the samples. Pass the inputs of one micro-batch.")


def measure_layers(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    num_rounds: int = 5,
    split: InputBackward | None = None,
) -> list[MeasuredLayer]:
    """Measure every layer with all samples of the example, and with half of them.

    Equal layers have equal times, the median of theirs, unless these differ by more than noise: else noise would make
    cuts uneven.

    Args:
        model: as for `split`.
        example: inputs of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        layers: as for `split`.
        loss_fn: its time is added to the last layer's.
        num_rounds: rounds whose median is reported.
        split: to measure I and W; None: half of the backward each.

    Raises:
        InputError: the example has no samples.
        SplitError: the layers of the model are unknown, or it is on the meta device.
    """
    found, whole = single_layers(model, layers), samples_of(example)
    modules = [(name, module) for name, module, _ in found]
    rows: list[dict[int, LayerRow]] = [{} for _ in found]
    kinds: list[list[Hashable]] = [[_kind(module)] for _, module in modules]
    for samples in dict.fromkeys((max(1, whole // 2), whole)):
        part = tree_map(lambda leaf, n=samples: _first(leaf, whole, n), example)
        times = profile_layers(modules, part, loss_fn=loss_fn, num_rounds=num_rounds, timer=None)
        every: Sequence[tuple[float, float] | None] = [None] * len(times)
        if split is not None:
            every = profile_halves(modules, part, split, loss_fn=loss_fn, num_rounds=num_rounds)
            every = _without(_extra_seconds(split, num_rounds), every)
        inputs = tree_leaves(part[0] if loss_fn is not None else part)
        received = float(sum(leaf.nbytes for leaf in inputs if isinstance(leaf, Tensor)))
        for row, kind, time, apart in zip(rows, kinds, times, every, strict=True):
            kept = float(time.kept_bytes or 0)
            halves = apart or (time.backward_seconds / 2,) * 2
            seconds = time.forward_seconds, time.backward_seconds, *halves
            row[samples] = LayerRow(*seconds, received, float(time.activation_bytes), kept)
            received = float(time.activation_bytes)
            kind.append(apart is None)
    if loss_fn is not None:
        kinds[-1].append("with the loss")
    rows = _evened(rows, kinds)
    names: dict[int, str] = {}
    for name, module in modules:
        for inner, parameter in module.named_parameters():
            names.setdefault(id(parameter), f"{name}/{inner}")
    return [
        MeasuredLayer(
            name=name,
            counted=counted,
            rows=row,
            parameters={names[id(each)]: tuple(each.shape) for each in module.parameters()},
            buffer_elements=sum(each.numel() for each in module.buffers()),
            dtypes=frozenset(str(each.dtype) for each in module.parameters() if each.is_floating_point()),
        )
        for (name, module, counted), row in zip(found, rows, strict=True)
    ]


def _kind(module: nn.Module) -> Hashable:
    """What equal layers have in common, beside the bytes of their rows; numbers in names are their places."""
    parameters = ((_NUMBER.sub("", name), tuple(each.shape), each.dtype) for name, each in module.named_parameters())
    return _PLACE.sub("", repr(module)), tuple(parameters)


def _evened(rows: Sequence[Mapping[int, LayerRow]], kinds: Sequence[Sequence[Hashable]]) -> list[dict[int, LayerRow]]:
    """Rows of layers, of which those of one kind and with the same bytes have the median of their times."""
    alike = defaultdict[Hashable, list[int]](list)
    for at, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        alike[tuple(kind), tuple((samples, each[4:]) for samples, each in row.items())].append(at)
    found = [dict(row) for row in rows]
    for group in alike.values():
        for samples in rows[group[0]]:
            usual = LayerRow(*map(median, zip(*(rows[at][samples] for at in group), strict=True)))
            for at in group:
                pairs = zip(rows[at][samples][:2], usual, strict=False)
                if all(a <= _NOISE * b and b <= _NOISE * a for a, b in pairs):
                    found[at][samples] = usual
    return found


def _extra_seconds(split: InputBackward, num_rounds: int) -> float:
    """Seconds that I and W of a small layer take more than its whole backward: once per stage, not once per layer."""
    layer, sample = [("", nn.Linear(1, 1))], torch.ones(1, 1)
    (halves,) = profile_halves(layer, sample, split, num_rounds=num_rounds)
    (whole,) = profile_layers(layer, sample, num_rounds=num_rounds, timer=None)
    return max(0.0, sum(halves or ()) - whole.backward_seconds)


def _without(extra: float, every: Sequence[tuple[float, float] | None]) -> list[tuple[float, float] | None]:
    """I and W of layers without half of `extra` seconds each; None too where nothing is left, of a tiny layer."""
    found = [None if each is None else (max(0.0, each[0] - extra / 2), max(0.0, each[1] - extra / 2)) for each in every]
    return [each if each is not None and any(each) else None for each in found]


def measure_calls(
    model: nn.Module, example: Any, *, num_stages: int, loss_fn: LossFn | None = None, num_rounds: int = 5
) -> list[MeasuredLayer]:
    """Trace a model, and measure the calls of its modules with all samples of the example, and with half of them.

    Args:
        model: a model that torch.export traces.
        example: inputs of one micro-batch, as for `split`; with `loss_fn`, the pair (inputs, targets).
        num_stages: the most stages to plan for: there are three or more calls of modules per stage, if there are so
            many.
        loss_fn: its time is added to the last call's.
        num_rounds: rounds whose median is reported.

    Returns:
        One row per call; `counted` are those at which a stage can begin, and their names are those of modules that
        ``split(cut=...)`` takes.

    Raises:
        InputError: the example has no samples.
        SplitError: the model cannot be traced, or is on the meta device.
    """
    from pipeloom.split.traced.export import trace_modes  # loads torch.export, which takes seconds
    from pipeloom.split.traced.segments import modules_begun, operations, segments_for
    from pipeloom.split.traced.timing import measure

    whole = samples_of(example)
    inputs, targets = example if loss_fn is not None else (example, None)
    trace = trace_modes(model, inputs)[model.training]
    nodes = operations(trace.graph_module.graph)
    segments = segments_for(nodes, num_stages)
    rows: list[dict[int, LayerRow]] = [{} for _ in segments]
    for samples in dict.fromkeys((whole, max(1, whole // 2))):
        part, part_targets = tree_map(lambda leaf, n=samples: _first(leaf, whole, n), (inputs, targets))
        try:
            leaves = trace.rules.check(part)
        except InputError:  # the trace holds for the example's number of samples alone
            continue
        received = float(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)))
        for row, each in zip(rows, measure(model, trace, segments, part, num_rounds), strict=True):
            sent = float(each.across_bytes or each.sent_bytes)
            half = each.backward_seconds / 2
            seconds = each.forward_seconds, each.backward_seconds, half, half
            row[samples] = LayerRow(*seconds, received, sent, float(each.kept_bytes))
            received = sent
        if loss_fn is not None:
            args, kwargs = trace.rules.signature.bind(part)
            with untouched([model], ()):
                output = model(*args, **kwargs)
            forward, backward, kept = _measure_loss(output, part_targets, loss_fn, num_rounds)
            last = rows[-1][samples]
            rows[-1][samples] = last._replace(
                forward=last.forward + forward,
                backward=last.backward + backward,
                inputs=last.inputs + backward,
                kept=last.kept + kept,
            )
    held = [
        {trace.held.get(source.name, "") for node in segment.nodes for source in node.all_input_nodes}
        for segment in segments
    ]
    begun = modules_begun(nodes, segments)
    names = [one or segment.name or type(model).__name__ for one, segment in zip(begun, segments, strict=True)]
    counted = [not number or one is not None for number, one in enumerate(begun)]
    return _rows_of_calls(model, names, counted, rows, held)


def _rows_of_calls(
    model: nn.Module,
    names: Sequence[str],
    counted: Sequence[bool],
    rows: Sequence[Mapping[int, LayerRow]],
    held: Sequence[Collection[str]],
) -> list[MeasuredLayer]:
    """One row per call, from what was measured of it, and the names of the tensors of the model that it reads."""
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found = []
    for name, counts, row, read in zip(names, counted, rows, held, strict=True):
        own = [parameters[each] for each in parameters if each in read]
        found.append(
            MeasuredLayer(
                name=name,
                counted=counts,
                rows=row,
                parameters={canonical[id(each)]: tuple(each.shape) for each in own},
                buffer_elements=sum(buffers[each].numel() for each in buffers if each in read),
                dtypes=frozenset(str(each.dtype) for each in own if each.is_floating_point()),
            )
        )
    return found


def _measure_loss(output: Any, targets: Any, loss_fn: LossFn, num_rounds: int) -> tuple[float, float, int]:
    """Median seconds of forward and backward of a loss, and the bytes that it keeps beside the output."""
    loss, same, output = loss_alone(loss_fn, targets), nn.Identity(), tree_map(fresh, output)
    kept = KeptStorages(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    with torch.enable_grad(), kept:
        loss(tree_map(lambda leaf: leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf, output))
    clock = Clock([same], output, None)
    rounds = [time_once(same, output, clock, loss=loss) for _ in range(1 + num_rounds)][1:]
    return median(each[0] for each in rounds), median(each[1] for each in rounds), kept.nbytes


def _first(leaf: Any, whole: int, samples: int) -> Any:
    """The first samples of a tensor that has all of them."""
    return leaf[:samples].clone() if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == whole else leaf
