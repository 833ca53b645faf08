"""Losses and quantities that a model declares inside its forward, such as the load balance of experts.

    auxiliary_loss     adds weight * value to what is trained
    observe            reports a quantity, such as the number of tokens per expert
    auxiliary_losses   collects both in a training loop without a pipeline

A pipeline collects them in every F. A value with a graph becomes a further root of that stage's backward, so it needs
no path through the stages behind it. Its gradient starts with weight * share, where share is the share of the
micro-batch (of the slice, of the replica) in the samples of the step: the weight that the loss has too.

A recomputation runs the forward again, inside a backward. What it declares is ignored, so a loss counts once. Reentrant
checkpointing (``use_reentrant=True``) runs the forward without a graph, so it trains no auxiliary loss.
"""

import math
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, folded
from pipeloom.split.stage_module import running

_graph_task = torch._C._current_graph_task_id  # -1 outside of backwards


class DeclaredLoss(NamedTuple):
    """One call of `auxiliary_loss`.

    Attributes:
        module: the module that the loss belongs to; None: unknown.
        name: of the loss.
        value: a scalar, perhaps with a graph.
        weight: its factor in what is trained.
    """

    module: nn.Module | None
    name: str
    value: Tensor
    weight: float


class ObservedQuantity(NamedTuple):
    """One call of `observe`: the module that the quantity belongs to, its name, and the values, without a graph."""

    module: nn.Module | None
    name: str
    values: Tensor


class Collected:
    """What forwards in this thread declared while it was open; the innermost open one collects.

    Args:
        within: the module that runs, until a layer of it is known.

    Attributes:
        losses, observed: in the order of the calls.
    """

    def __init__(self, within: nn.Module | None = None) -> None:
        self._within = within
        self.losses: list[DeclaredLoss] = []
        self.observed: list[ObservedQuantity] = []
        self._outer: Collected | None = None

    def total(self) -> Tensor:
        """The sum of weight * value over the losses, with their graphs; a scalar. Zero where there are none."""
        terms = [loss.value.reshape(()) * loss.weight for loss in self.losses]
        return torch.zeros(()) if not terms else sum(terms[1:], terms[0])

    def __enter__(self) -> Self:
        self._outer, _thread.collected = _thread.collected, self
        running.layer = self._within
        return self

    def __exit__(self, *_: object) -> None:
        _thread.collected, self._outer = self._outer, None
        running.layer = None


class _Thread(threading.local):
    collected: Collected | None = None


_thread = _Thread()


def auxiliary_loss(
    value: Tensor, weight: float = 1.0, name: str = "auxiliary", *, module: nn.Module | None = None
) -> None:
    """Add ``weight * value`` to the loss that is trained. Call it anywhere in a model's forward, in any stage.

    In a pipeline, a step trains ``sum of share * (loss + weight * value)`` over all micro-batches, slices and replicas,
    where share is the micro-batch's share of all samples, as for the loss itself. `Pipeline.step` returns the loss of
    `loss_fn` alone; `Pipeline.auxiliary_losses` has the values. Evaluation reports the values and trains nothing.

    All data-parallel replicas must declare the same losses in the same order. Outside of a pipeline, the call does
    nothing unless `auxiliary_losses` is open.

    Args:
        value: a scalar: the mean over the tokens of the forward that runs. Without a graph it is only reported.
        weight: its factor.
        name: under which the value is reported. Losses of one name in one layer are added up.
        module: the module under whose name the loss is reported. None: the layer that runs.

    Raises:
        InputError: the value is not a floating-point scalar, or the weight is not a finite number.
    """
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.dtype.is_floating_point:
        seen = f"a {value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else folded(value)
        raise InputError(f"auxiliary_loss {name!r} is {seen}: must be a floating-point scalar tensor. Take its mean.")
    _check_name("auxiliary_loss", name)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise InputError(f"auxiliary_loss {name!r} has weight={folded(weight)}: must be a finite number.")
    found = _open()
    if found is not None:
        # A copy: the value may be a parameter, whose memory is freed between computations, or a view of one.
        found.losses.append(
            DeclaredLoss(running.layer if module is None else module, name, value.clone(), float(weight))
        )


def observe(name: str, values: Tensor, *, module: nn.Module | None = None) -> None:
    """Report a quantity of this forward, such as the number of tokens per expert; it trains nothing.

    A pipeline adds the quantity up over the micro-batches, slices and replicas of a step: `Pipeline.observations`.
    After every step it calls ``module.after_step(observed)`` of each module that has this method, without gradients:
    `observed` has the sums of the module, and of the modules that it is in, by name (float64, on the CPU). They are
    the same on all processes, so a module may change its buffers by them.

    Args:
        name: of the quantity. Quantities of one name in one layer are added up, so they must have one shape.
        values: integers, floating-point numbers or booleans, of any shape; copied without a graph.
        module: the module under whose name the quantity is reported. None: the layer that runs.

    Raises:
        InputError: the values are not a tensor of real numbers.
    """
    if not isinstance(values, Tensor) or values.is_complex():
        seen = f"a {values.dtype} tensor" if isinstance(values, Tensor) else folded(values)
        raise InputError(f"observe {name!r}: the values are {seen}: must be a tensor of real numbers. Convert them.")
    _check_name("observe", name)
    found = _open()
    if found is not None:
        found.observed.append(
            ObservedQuantity(running.layer if module is None else module, name, values.detach().clone())
        )


@contextmanager
def auxiliary_losses() -> Generator[Collected]:
    """Collect what forwards in this thread declare, in a training loop without a pipeline::

        with pipeloom.auxiliary_losses() as found:
            output = model(inputs)
        (loss_fn(output, targets) + found.total()).backward()

    The losses are in ``found.losses``, the quantities of `observe` in ``found.observed``.
    """
    with Collected() as found:
        yield found


def collecting() -> bool:
    """Whether what is declared in this thread now is collected."""
    return _open() is not None


def _open() -> Collected | None:
    """What collects in this thread; None: nothing does, or a recomputation runs."""
    if torch.compiler.is_exporting():
        raise InputError("auxiliary losses and observed quantities are lost in a traced model. Split it by its layers.")
    found = _thread.collected
    return None if found is None or _graph_task() != -1 else found


def _check_name(function: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InputError(f"{function}: name={folded(name)}: must be a string that is not empty.")
