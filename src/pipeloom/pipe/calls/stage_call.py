"""One micro-batch in one partition: its forward, its recomputation, its backward.

The graph of a call ends at the tensors that come from and go to other partitions. So partitions run their backwards in
threads of their own, at the same time, on any device.
"""

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from pipeloom.autograd.auxiliary_losses import Collected
from pipeloom.common.overlaps import overlapping, share_storage
from pipeloom.errors import PipeTypeError, RunError
from pipeloom.pipe.calls.buffers import BufferCheck, kept_statistics
from pipeloom.pipe.calls.devices import Mark, Receiver, mark
from pipeloom.pipe.calls.local_graph import check_leaves, naming_reentrant_checkpoints, without_hooks
from pipeloom.pipe.calls.modes import ThreadModes
from pipeloom.pipe.calls.randomness import BatchRandomness, RandomState
from pipeloom.pipe.calls.stage_values import InputGradients, Output, OutputGradients, Partition, Sent
from pipeloom.pipe.calls.used_tensors import UsedTensors
from pipeloom.pipe.micro_batches import Value, check_value, tensors_of
from pipeloom.split.skippable import SkipKey, skip_values


class _Thread(threading.local):
    checkpointing = False
    recomputing = False


_thread = _Thread()


def is_checkpointing() -> bool:
    """Whether this thread runs a forward of a `Pipe` that its backward will run again."""
    return _thread.checkpointing


def is_recomputing() -> bool:
    """Whether this thread runs a forward of a `Pipe` again, for its backward."""
    return _thread.recomputing


class _PassOn(torch.autograd.Function):
    """A result with the memory of its input that is neither a leaf nor a view: layers may change it in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> Tensor:
        return gradient


class _Result:
    """What the layers gave: their value, the skips to send, and the auxiliary losses that they declared.

    Attributes:
        overlapping: inputs that have memory in common with other values between partitions.
    """

    def __init__(self, value: Value, skips: dict[SkipKey, Tensor | None], found: Collected) -> None:
        self.value = value
        self.skips = skips
        self.found = found
        self.overlapping: list[Tensor] = []


class StageCall:
    """One micro-batch in one partition.

    Args:
        partition: the layers.
        microbatch: its position in the batch.
        parameters: those of the partition that require gradients.
        used: what the partition's layers hold in this batch.
        recompute: whether the backward runs the forward again.
        modes: torch's modes of the user's thread.
        randomness: of the batch.
        collects: whether auxiliary losses are collected.
    """

    def __init__(
        self,
        partition: Partition,
        microbatch: int,
        parameters: Sequence[Tensor],
        used: UsedTensors,
        *,
        recompute: bool,
        modes: ThreadModes,
        randomness: BatchRandomness,
        collects: bool,
    ) -> None:
        self._partition = partition
        self._microbatch = microbatch
        self._parameters, self._used = list(parameters), used
        self.recompute = recompute
        self._modes = modes
        self._randomness = randomness
        self._collects = collects
        self._state = RandomState(None, None)
        self._inputs: list[Sent] = []  # tensors of the value, then those of skips
        self._atomic = True
        self._skips: dict[SkipKey, bool] = {}  # that came, and whether they are tensors
        self._sent: list[SkipKey] = []  # skips that went out as tensors
        self._roots: list[Tensor] = []  # of the graph: tensors of the value, skips, auxiliary losses
        self._leaves: list[Tensor | None] = []  # of the graph, one per input; None: needs no gradient
        self._done = False

    @property
    def place(self) -> str:
        """Partition and micro-batch, for messages."""
        return f"{self._partition.name}, micro-batch {self._microbatch}"

    def forward(
        self, inputs: list[Sent], skips: dict[SkipKey, Sent | None], *, atomic: bool, receiver: Receiver
    ) -> Output:
        """Run the layers in the partition's thread."""
        present = [each for each in skips.values() if each is not None]
        arrived = {id(each.tensor): receiver.receive(each.tensor, each.ready) for each in [*inputs, *present]}
        together = {id(each.tensor) for each in present}  # a value that is a skip too arrives as one tensor
        inputs = [each._replace(overlaps=each.overlaps and id(each.tensor) not in together) for each in inputs]
        self._inputs = [each._replace(tensor=arrived[id(each.tensor)]) for each in [*inputs, *present]]
        self._skips = {key: each is not None for key, each in skips.items()}
        self._atomic = atomic
        gradients = self._modes.gradients
        requires = gradients and (bool(self._parameters) or any(each.differentiable for each in self._inputs))
        self.recompute = self.recompute and requires
        device = self._partition.device
        with self._randomness.forward(self._microbatch, self._partition.index, device) as state:
            result = self._run()
        self._state = state[0]
        if gradients and not self.recompute:
            self._keep_graph(result)
        ready = mark(device)

        tensors, skipping = self._outgoing(result, ready)
        if not self.recompute:
            self._inputs = []
        return Output(
            tensors,
            isinstance(result.value, Tensor),
            skipping,
            [loss._replace(value=loss.value.detach()) for loss in result.found.losses],
            result.found.observed,
        )

    def _outgoing(self, result: _Result, ready: Mark) -> tuple[list[Sent], dict[SkipKey, Sent | None]]:
        """The value and the skips, without graphs; a tensor that occurs several times stays one."""
        batch = [each.tensor for each in self._inputs] if not self._partition.index else []
        value, skips = tensors_of(result.value), [skip for skip in result.skips.values() if skip is not None]
        skipped = {id(skip) for skip in skips}
        made: dict[int, Sent] = {}
        for tensor, overlaps in zip([*value, *skips], overlapping([*value, *skips]), strict=True):
            if id(tensor) not in made:
                can = tensor.is_floating_point() or tensor.is_complex()
                found = tensor.detach()
                if any(map(partial(share_storage, tensor), batch)):
                    found = found.clone()  # later layers may change it in place: the user's batch stays
                overlaps |= any(map(partial(share_storage, tensor), result.overlapping))
                made[id(tensor)] = Sent(found, can if self.recompute else tensor.requires_grad, ready, overlaps)
        tensors = [made[id(each)]._replace(overlaps=True) if id(each) in skipped else made[id(each)] for each in value]
        return tensors, {key: None if skip is None else made[id(skip)] for key, skip in result.skips.items()}

    def recomputation(self) -> None:
        """Run the forward again, with a graph, in the partition's thread."""
        self._check_not_done()
        _thread.recomputing = True
        try:
            with self._randomness.recomputation(self._state, self._partition.device):
                tensors = self._tensors(gradients=True, copies=bool(self._partition.works_in_place))
                with self._used.in_place(), kept_statistics(self._partition.module):
                    result = self._call(tensors, gradients=True)
        finally:
            _thread.recomputing = False
        self._keep_graph(result)

    def _run(self) -> _Result:
        """The forward. It leaves inputs as they are that the user or a recomputation needs."""
        partition = self._partition
        needed = self.recompute or not partition.index
        copies = (
            needed and partition.works_in_place is not False
        )  # the first time, a copy shows whether layers change it
        overlaps = [each.overlaps for each in self._inputs]
        watched = (needed or any(overlaps)) and not self._modes.inference  # where tensors have no versions
        buffers = BufferCheck(partition.module) if self.recompute and not partition.buffers_checked else None
        _thread.checkpointing = self.recompute
        try:
            tensors = self._tensors(gradients=self._modes.gradients and not self.recompute, copies=copies)
            versions = [tensor._version for tensor in tensors] if watched else []
            result = self._call(tensors, gradients=self._modes.gradients and not self.recompute)
        finally:
            _thread.checkpointing = False
        if buffers is not None:
            buffers.check(partition.name)
            partition.buffers_checked = True
        differ = [tensor._version != version for tensor, version in zip(tensors, versions, strict=watched)]
        if any(one and other for one, other in zip(differ, overlaps, strict=watched)):
            raise RunError(
                f"{partition.name} changes an input in place that has memory in common with another value between "
                "partitions, such as a view of it, which would stay as it was. Copy the input before (x = x.clone()), "
                "or put both layers into one partition."
            )
        result.overlapping = [tensor for tensor, other in zip(tensors, overlaps, strict=True) if other]
        if watched and needed:
            changed = any(differ)
            if changed and self.recompute and not copies:
                raise RunError(
                    f"{partition.name} changes its input in place, which it did not do before: a recomputation would "
                    "start from the changed values. Use checkpoint='never', or copy the input in the first layer."
                )
            partition.works_in_place = bool(partition.works_in_place) or changed
        return result

    def _tensors(self, *, gradients: bool, copies: bool) -> list[Tensor]:
        """The layers' inputs, with new leaves: a tensor that occurs several times has one, in its first place."""
        self._leaves, tensors = [], []
        made: dict[int, Tensor] = {}
        for each in self._inputs:
            tensor, leaf = each.tensor, None
            if id(tensor) in made:
                self._leaves.append(None)
                tensors.append(made[id(tensor)])
                continue
            if gradients and each.differentiable:
                leaf = tensor = each.tensor.detach().requires_grad_()
                if not copies:
                    tensor = _PassOn.apply(leaf)  # type: ignore[no-untyped-call]
            self._leaves.append(leaf)
            with torch.set_grad_enabled(gradients):
                made[id(each.tensor)] = tensor.clone() if copies else tensor
            tensors.append(made[id(each.tensor)])
        return tensors

    def _call(self, tensors: list[Tensor], *, gradients: bool) -> _Result:
        partition = self._partition
        skipped = iter(tensors[len(tensors) - sum(self._skips.values()) :])
        values: dict[SkipKey, Any] = {key: next(skipped) if there else None for key, there in self._skips.items()}
        num_inputs = len(tensors) - sum(self._skips.values())
        found = Collected()
        collecting = found if self._collects else nullcontext()
        with self._modes.active(gradients=gradients), skip_values(values), collecting:
            value = partition.module(tensors[0] if self._atomic else tuple(tensors[:num_inputs]))
        check_value(value, f"the output of {partition.name}")
        wrong = next((tensor for tensor in tensors_of(value) if tensor.device != partition.device), None)
        if wrong is not None:
            raise PipeTypeError(
                f"{partition.name} returns a tensor on {wrong.device}: must be on the partition's device."
            )
        sent = {key: values.pop(key) for key in partition.sent}
        for key, skip in sent.items():
            if not isinstance(skip, Tensor | None):
                raise PipeTypeError(f"skip {key.name!r} goes to another partition: must be a tensor or None.")
        self._sent = [key for key, skip in sent.items() if skip is not None]
        return _Result(value, sent, found)

    def _keep_graph(self, result: _Result) -> None:
        skips = [skip for skip in result.skips.values() if skip is not None]
        self._roots = [*tensors_of(result.value), *skips, *(loss.value for loss in result.found.losses)]
        partition = self._partition
        mode = (partition.module.training, len(self._parameters))
        if mode not in partition.checked:
            check_leaves(partition, self._roots, [*self._leaves, *self._parameters])
            partition.checked.add(mode)

    def _check_not_done(self) -> None:
        if self._done:
            raise RunError(
                "a second backward through the output of a Pipe, whose values the first one freed. Use "
                "retain_graph=True in the first one."
            )

    def backward(self, given: OutputGradients, *, keep: bool, receiver: Receiver) -> InputGradients:
        """Run the backward in the partition's thread.

        Args:
            given: gradients of what the forward gave.
            keep: whether a further backward may follow.
            receiver: brings the gradients to the partition's device.
        """
        self._check_not_done()
        arrived = [(each, given.ready) for each in given.tensors or ()]
        arrived += [given.skips.get(key, (None, None)) for key in self._sent]
        arrived += [(each, given.ready) for each in given.losses]
        pairs = [
            (root, receiver.receive(gradient, ready))
            for root, (gradient, ready) in zip(self._roots, arrived, strict=True)
            if gradient is not None and root.requires_grad
        ]
        wanted = [leaf for leaf in self._leaves if leaf is not None] + self._parameters
        found: list[Tensor | None] = [None] * len(wanted)
        if pairs and wanted:
            roots, gradients = zip(*pairs, strict=True)
            with without_hooks(self._parameters), naming_reentrant_checkpoints(self._partition.name):
                found = list(
                    torch.autograd.grad(
                        roots, wanted, gradients, retain_graph=keep and not self.recompute, allow_unused=True
                    )
                )
        parts = iter(found)
        of_inputs = [None if leaf is None else next(parts) for leaf in self._leaves]
        num_inputs = len(of_inputs) - sum(self._skips.values())
        skips = zip([key for key, there in self._skips.items() if there], of_inputs[num_inputs:], strict=True)
        if self.recompute or not keep:
            self._roots, self._leaves = [], []
        if not keep:
            self._inputs, self._done = [], True
        return InputGradients(of_inputs[:num_inputs], dict(skips), list(parts), mark(self._partition.device))
