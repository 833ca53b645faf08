"""Measures the layers of a model on micro-batches of two sizes: times, bytes, and the shapes of parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import InputError
from pipeloom.split.profile import LossFn, profile_layers
from pipeloom.split.stages import single_layers


class LayerRow(NamedTuple):
    """A layer on one micro-batch: seconds, and bytes of its input, of its output, and kept by its forward."""

    forward: float
    backward: float
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
            return int(leaf.shape[0])
    raise InputError("example: has no tensor whose first dimension is the samples. Pass the inputs of one micro-batch.")


def measure_layers(
    model: nn.Module | Sequence[nn.Module],
    example: Any,
    *,
    layers: Sequence[str] | None = None,
    loss_fn: LossFn | None = None,
    num_rounds: int = 5,
) -> list[MeasuredLayer]:
    """Measure every layer with all samples of the example, and with half of them.

    Args:
        model: as for `split`.
        example: inputs of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        layers: as for `split`.
        loss_fn: its time is added to the last layer's.
        num_rounds: rounds whose median is reported.

    Raises:
        InputError: the example has no samples.
        SplitError: the layers of the model are unknown, or it is on the meta device.
    """
    found, whole = single_layers(model, layers), samples_of(example)
    modules = [(name, module) for name, module, _ in found]
    rows: list[dict[int, LayerRow]] = [{} for _ in found]
    for samples in dict.fromkeys((max(1, whole // 2), whole)):
        part = tree_map(lambda leaf, n=samples: _first(leaf, whole, n), example)
        times = profile_layers(modules, part, loss_fn=loss_fn, num_rounds=num_rounds)
        inputs = tree_leaves(part[0] if loss_fn is not None else part)
        received = float(sum(leaf.nbytes for leaf in inputs if isinstance(leaf, Tensor)))
        for row, time in zip(rows, times, strict=True):
            kept = float(time.kept_bytes or 0)
            row[samples] = LayerRow(time.forward_seconds, time.backward_seconds, received, time.activation_bytes, kept)
            received = float(time.activation_bytes)
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


def _first(leaf: Any, whole: int, samples: int) -> Any:
    """The first samples of a tensor that has all of them."""
    return leaf[:samples].clone() if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == whole else leaf
