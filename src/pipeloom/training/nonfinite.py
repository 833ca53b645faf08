"""`NonFiniteSearch`: runs a step again, and finds the first value in it that is not finite.

A value that is not finite makes everything after it not finite, on all stages. The step therefore runs a second time
with the random numbers and buffers of the first time, and with hooks on every layer:

    forward    the output of a layer is checked once the layer returns, inner layers before outer ones
    backward   the gradients of a layer's inputs and of its parameters are checked once they are complete

Of all findings, the first one counts: micro-batches in their order, forward before backward, and along the stages in
the direction of the pass; weight gradients of a split backward after all others. Where the second time is finite, the
first time was a fault of the hardware.
"""

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Op
from pipeloom.training.pipeline import Pipeline

_DIRECTIONS = {Op.F: 0, Op.W: 2}  # and 1 for backwards
Order = tuple[int, int, int, int, int]  # micro-batch, direction, stage along it, slice along it, replica


class Finding(NamedTuple):
    """A value that is not finite.

    Attributes:
        order: findings compare by it.
        text: where it is.
    """

    order: Order
    text: str


class NonFiniteSearch:
    """Finds the first value that is not finite, in a step that is run again.

    Args:
        pipeline: of synchronous steps, without CUDA graphs.
        gather: all-gathers a JSON value over processes.
        replica: the data-parallel replica of this process.
        num_replicas: the data-parallel degree.
    """

    def __init__(
        self, pipeline: Pipeline, gather: Callable[[Any], list[Any]], *, replica: int = 0, num_replicas: int = 1
    ) -> None:
        self._pipeline, self._gather = pipeline, gather
        self._replica, self._of_replica = replica, f" of replica {replica}" if num_replicas > 1 else ""
        self._buffers = [
            buffer
            for stage in pipeline.modules()
            for module in stage.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        ]
        self._kept: list[Tensor] = []
        self._random: tuple[Any, ...] = ()

    def begin(self) -> None:
        """Before a step: keep the states of random generators, and copies of persistent buffers."""
        used = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if used else None
        self._random = torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()
        self._kept = [buffer.detach().clone() for buffer in self._buffers]

    @contextmanager
    def searching(self) -> Iterator[list[Finding]]:
        """Around the second run of the step; the findings of this process are in the list afterwards."""
        own, cuda, numpy_state, python_state = self._random
        torch.set_rng_state(own)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        found = [*self._parameters()]
        stages_of = self._pipeline.state.stages_of
        watches = {rank: _RankWatch(rank, stages, found, self._place) for rank, stages in stages_of.items()}
        try:
            with self._pipeline.executor.wrapping(lambda state, *step: watches[state.wiring.rank].around(state, *step)):
                yield found
        finally:
            for watch in watches.values():
                watch.close()

    def first(self, found: list[Finding], *, own_finite: bool) -> tuple[str | None, tuple[int, ...]]:
        """Where the first of all processes' findings is, and processes whose own gradients were not finite before."""
        gathered = self._gather([own_finite, [min(found)] if found else []])
        rows = [(tuple(order), text) for _, answer in gathered for order, text in answer]
        ranks = tuple(rank for rank, (finite, _) in enumerate(gathered) if not finite)
        return min(rows)[1] if rows else None, ranks

    def _parameters(self) -> Iterator[Finding]:
        for name, parameter in self._pipeline.named_parameters():
            if (what := _unfit(parameter)) is not None:
                yield Finding((-1, 0, 0, 0, self._replica), f"parameter {name} itself, which has {what}")

    def _place(self, rank: int, action: Action, text: str) -> Finding:
        stage, op, microbatch, piece = action
        forward = op is Op.F
        order = (
            -1 if microbatch is None else microbatch,
            _DIRECTIONS.get(op, 1),
            stage if forward else -stage,
            (piece or 0) if forward else -(piece or 0),
            self._replica,
        )
        name = {Op.F: "forward", Op.W: "weight backward"}.get(op, "backward")
        part = "" if piece is None else f", slice {piece}"
        where = f"{name} of micro-batch {microbatch}{part} on stage {stage}, rank {rank}{self._of_replica}"
        return Finding(order, f"{text}, in the {where}")


class _RankWatch:
    """The hooks on the layers of one rank, which know the action that runs."""

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, nn.Module],
        found: list[Finding],
        place: Callable[[int, Action, str], Finding],
    ) -> None:
        self._rank, self._found, self._place = rank, found, place
        self._action: Action | None = None
        self._told = False  # the first finding of an action is its cause
        self._labels: dict[int, _Consumers] = {}
        self._parameters: set[int] = set()
        self._handles: list[RemovableHandle] = []
        for stage in stages.values():
            for name, module in stage.named_modules():
                before, after = partial(self._enters, name), partial(self._leaves, name)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
                self._handles.append(module.register_forward_hook(after))

    def around(self, state: RankState, action: Action, step: Step) -> Step:
        """The step of an action, and what follows from its result."""
        run, ready = step
        losses = action.op is Op.F

        def watched() -> None:
            self._action, self._told = action, False
            self._labels.clear()
            run()
            if losses and action.microbatch is not None:
                loss = state.batch.losses.get(action.microbatch)
                if loss is not None:
                    self._check(loss, "the loss, of finite outputs")

        return watched, ready

    def close(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _check(self, tensor: Tensor, text: str, *, mask: bool = False) -> None:
        if self._action is None or self._told or (what := _unfit(tensor, mask=mask)) is None:
            return
        self._told = True
        self._found.append(self._place(self._rank, self._action, f"{text}, which has {what}"))

    def _enters(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in _floating((args, kwargs)):
            if not name:
                self._check(tensor, "the input of the stage", mask=not tensor.requires_grad)
            if not tensor.requires_grad:
                continue
            known = self._labels.get(id(tensor))
            if known is None:
                known = self._labels[id(tensor)] = _Consumers(tensor, name)
                self._hook(tensor, "the gradient of the input of", known)
            else:
                known.add(name)

    def _leaves(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _floating(output):
            self._check(tensor, f"the output of {_layer(name)}", mask=not tensor.requires_grad)
            if not name and tensor.requires_grad:
                self._hook(tensor, "the gradient of the output of", "the stage")
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._parameters:
                self._parameters.add(id(parameter))
                self._hook(parameter, "the gradient of parameter", f"{name}.{key}" if name else key)

    def _hook(self, tensor: Tensor, what: str, where: "_Consumers | str") -> None:
        def arrived(gradient: Tensor) -> None:
            self._check(gradient, f"{what} {where}")

        self._handles.append(tensor.register_hook(arrived))  # type: ignore[no-untyped-call]


class _Consumers:
    """The layers that a tensor enters: the innermost one, or the one around them where several read it."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self._tensor = tensor  # kept, so that its id stays its own
        self._name, self._several = name, False

    def add(self, name: str) -> None:
        """A layer that it enters too, after those known."""
        inside = not self._name or name.startswith(f"{self._name}.")
        if inside and not self._several:
            self._name = name
        elif not inside:
            self._several = True
            shared = zip(self._name.split("."), name.split("."), strict=False)
            self._name = ".".join(_equal(shared))

    def __str__(self) -> str:
        return _layer(self._name)


def _equal(pairs: Iterator[tuple[str, str]]) -> Generator[str]:
    for one, other in pairs:
        if one != other:
            return
        yield one


def _layer(name: str) -> str:
    return f"layer {name}" if name else "the stage"


def _floating(value: Any) -> Iterator[Tensor]:
    """The floating-point tensors, without those of subclasses, such as logits that ranks share."""
    return (each for each in tree_leaves(value) if type(each) in (Tensor, nn.Parameter) and each.is_floating_point())


def _unfit(tensor: Tensor, *, mask: bool = False) -> str | None:
    """How many values are not finite, such as ``nan in 3 of 64 values``; -inf is fit for what may be a mask."""
    values = tensor.detach()
    bad = ~values.isfinite()
    if mask:
        bad &= values != float("-inf")
    count = int(bad.sum())
    if not count:
        return None
    kind = "nan" if bool(values.isnan().any()) else "inf"
    return f"{kind} in {count} of {values.numel()} values"
