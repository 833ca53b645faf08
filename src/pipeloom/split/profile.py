"""Measures the time and memory of each layer of a chain."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.common.cores import usable_cores
from pipeloom.errors import InputError, SplitError, folded
from pipeloom.split.kept_bytes import fresh, kept_bytes
from pipeloom.split.stage_module import may_change_input

LossFn = Callable[[Any, Any], Tensor | Mapping[str, Any]]
InputBackward = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Callable[[], None]]
"""Runs I of outputs, their gradients and the inputs; returns W. Parameters get their gradients in W."""


class LayerTime(NamedTuple):
    """Time and memory of one layer on one sample.

    Attributes:
        name: name of the layer.
        forward_seconds: median time of the forward.
        backward_seconds: median time of the full backward, with input and weight gradients.
        activation_bytes: size of all output tensors, which are sent to the next layer.
        parameter_bytes: size of its parameters, with those shared with other layers (`Tie`).
        kept_bytes: what its forward keeps for its backward, without parameters and buffers; None: not measured.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: int
    parameter_bytes: int
    kept_bytes: int | None = None


def profile_layers(
    layers: Sequence[tuple[str, nn.Module]],
    sample: Any,
    *,
    loss_fn: LossFn | None = None,
    num_warmups: int = 2,
    num_rounds: int = 5,
    timer: Callable[[], float] | None = perf_counter,
) -> list[LayerTime]:
    """Run every layer forward and backward and return the median times.

    Gradients, buffers (such as BatchNorm's statistics) and the random state are restored. The layers run in their
    current mode (train or eval).

    Args:
        layers: names and modules in execution order.
        sample: the input of one micro-batch; with `loss_fn`, the pair (inputs, targets).
        loss_fn: its time is added to the last layer's.
        num_warmups: rounds that are discarded.
        num_rounds: rounds whose median is reported.
        timer: returns seconds; called after the devices are synchronized. None: see `Clock`.

    Raises:
        SplitError: a layer is on the meta device.
    """
    value, targets = sample if loss_fn is not None else (sample, None)
    modules = [module for _, module in layers]
    clock = Clock(modules, value, timer)

    times: list[LayerTime] = []
    with untouched(modules, clock.cuda):
        for name, module in layers:
            is_last = len(times) == len(layers) - 1
            tail = loss_alone(loss_fn, targets) if loss_fn is not None and is_last else None
            rounds = [time_once(module, value, clock, loss=tail) for _ in range(num_warmups + num_rounds)]
            forward, backward, _ = zip(*rounds[num_warmups:], strict=True)
            kept, value = kept_bytes(module, value)
            sent = sum(leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
            size = sum(parameter.nbytes for parameter in module.parameters())
            times.append(LayerTime(name, median(forward), median(backward), sent, size, kept))
    return times


def profile_halves(
    layers: Sequence[tuple[str, nn.Module]],
    sample: Any,
    split: InputBackward,
    *,
    loss_fn: LossFn | None = None,
    num_warmups: int = 2,
    num_rounds: int = 5,
) -> list[tuple[float, float] | None]:
    """Median seconds of I and W of every layer; None for a layer with hooks on its parameters, which would run.

    Args:
        layers, sample, loss_fn, num_warmups, num_rounds: as for `profile_layers`.
        split: runs I.
    """
    value, targets = sample if loss_fn is not None else (sample, None)
    modules = [module for _, module in layers]
    clock, found = Clock(modules, value, None), list[tuple[float, float] | None]()
    with untouched(modules, clock.cuda):
        for module in modules:
            tail = loss_alone(loss_fn, targets) if loss_fn is not None and len(found) == len(modules) - 1 else None
            if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in module.parameters()):
                found.append(None)
            else:
                rounds = [time_split(module, value, clock, split, loss=tail) for _ in range(num_warmups + num_rounds)]
                inputs, weights = zip(*rounds[num_warmups:], strict=True)
                found.append((median(inputs), median(weights)))
            value = kept_bytes(module, value)[1]
    return found


def loss_alone(loss_fn: LossFn, targets: Any) -> Callable[[Any], Any]:
    """The loss of an output, without the metrics that a dict has beside it."""

    def loss(output: Any) -> Any:
        result = loss_fn(output, targets)
        value = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else folded(value)
            raise InputError(f"loss_fn returned {what}: must be the loss as a tensor with one number.")
        return value

    return loss


def steady_timer() -> Callable[[], float]:
    """The timer that background load disturbs least: with one thread its CPU time, else elapsed time.

    Autograd runs the backward of CPU tensors in the calling thread.
    """
    return thread_time if torch.get_num_threads() == 1 else perf_counter


class Clock:
    """A timer that synchronizes the CUDA devices of modules before it reads the time.

    Args:
        modules: the modules to measure.
        value: their input.
        timer: returns seconds; None: `steady_timer` on the CPU, else elapsed time.

    Attributes:
        cuda: indices of the CUDA devices.

    Raises:
        SplitError: a tensor is on the meta device.
    """

    def __init__(self, modules: Iterable[nn.Module], value: Any, timer: Callable[[], float] | None) -> None:
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())] + tree_leaves(value)
        devices = {t.device for t in tensors if isinstance(t, Tensor)}
        if any(device.type == "meta" for device in devices):
            fix = "Materialize the model, or use cut='layers'."
            raise SplitError(f"a layer on the meta device cannot be measured. {fix}")
        self.cuda = sorted(device.index or 0 for device in devices if device.type == "cuda")
        self._timer = timer or (perf_counter if self.cuda else steady_timer())

    def __call__(self) -> float:
        for index in self.cuda:
            torch.cuda.synchronize(index)
        return self._timer()


@contextmanager
def untouched(modules: Iterable[nn.Module], cuda: Sequence[int]) -> Iterator[None]:
    """Enable gradients, and restore the buffers of `modules` and the random state at the end."""
    parts = [part for module in modules for part in module.modules()]
    buffers = [(part, name, buffer) for part in parts for name, buffer in part._buffers.items() if buffer is not None]
    values = [buffer.detach().clone() for *_, buffer in buffers]
    try:
        with torch.random.fork_rng(devices=cuda), torch.enable_grad():
            yield
    finally:
        with torch.no_grad():
            for (part, name, buffer), before in zip(buffers, values, strict=True):
                part._buffers[name] = buffer.copy_(before)  # the tensor object itself, not only its values


@contextmanager
def threads_of_a_rank(num_ranks: int) -> Iterator[None]:
    """Use as many CPU threads as the launcher gives each of `num_ranks` ranks on this machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, usable_cores() // num_ranks))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def time_once(
    module: nn.Module,
    value: Any,
    clock: Callable[[], float],
    *,
    loss: Callable[[Any], Any] | None = None,
    around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[float, float, Any]:
    """(forward seconds, backward seconds, detached output) of one run; does not change ``.grad`` of the parameters.

    Args:
        module: the module to measure.
        value: its input.
        clock: returns seconds.
        loss: applied to the output; counts as part of the forward.
        around_backward: a context for the backward; entering and leaving it is not measured.
    """
    value = tree_map(fresh, value)
    sources = [t for t in (*tree_leaves(value), *module.parameters()) if isinstance(t, Tensor) and t.requires_grad]
    if may_change_input(module):
        value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
    start = clock()
    output = module(value)
    result = output if loss is None else loss(output)
    forwarded = clock()
    roots = [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]
    backward = 0.0
    if roots and sources:
        seeds = list(map(torch.ones_like, roots))
        with around_backward():
            begun = clock()
            torch.autograd.grad(roots, sources, seeds, allow_unused=True)
            backward = clock() - begun
    return forwarded - start, backward, tree_map(fresh, output)


def time_split(
    module: nn.Module,
    value: Any,
    clock: Callable[[], float],
    split: InputBackward,
    *,
    loss: Callable[[Any], Any] | None = None,
) -> tuple[float, float]:
    """Seconds of I and W of one run; arguments as for `time_once`."""
    value = tree_map(fresh, value)
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if may_change_input(module):
        value = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, value)
    output = module(value)
    result = output if loss is None else loss(output)
    roots = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    seeds = list(map(torch.ones_like, roots))
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        for parameter, _ in before:
            parameter.grad = None
        start = clock()
        weights = split(roots, seeds, leaves)
        middle = clock()
        weights()
        return middle - start, clock() - middle
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
