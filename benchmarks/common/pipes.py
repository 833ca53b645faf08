"""The program of a rank by the shortest means that Python has: what the machine takes, whatever the library.

Stages that wait, autograd's engine without checks, and named pipes that carry 16 bytes a message: neither layouts, nor
call numbers, nor checks, nor records, nor losses that ranks tell each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common.workloads import Workload
from pipeloom.autograd.split_backward import WeightGradients, backward_input, root_of, run_backward
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.ir.walk import meets

_FLOATS = 4  # a message: the output of a `WaitingStage` for one sample
_Key = tuple[int, int | None]


class PipeProgram:
    """One rank's part of a program of `WaitingWorkload`.

    Args:
        program: what ranks run.
        pipes: where its pipes are; the same path on all ranks, without their names' ends.
    """

    def __init__(self, workload: Workload, program: Program, rank: int, pipes: Path) -> None:
        model, M = workload.model(), workload.num_microbatches
        inputs, targets = workload.batch()
        self._inputs, self._targets = inputs.chunk(M), targets.chunk(M)
        self._modules, self._loss, self._weight = list(model), workload.loss, 1 / M
        self._seed = torch.tensor(self._weight)
        self._program, self._rank, self._path = program, rank, pipes
        self._last = program.schedule.num_stages - 1
        self._arrived: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        self._leaving: dict[_Key, Tensor] = {}
        self._saved: dict[_Key, tuple[Tensor, Tensor]] = {}
        self._split: dict[_Key, WeightGradients] = {}
        self._losses: list[Tensor] = []
        self._pipes: dict[str, int] = {}
        self._steps = [self._bind(action) for action in program.orders[rank]]
        held = program.placement.stages_of[rank]
        self.parameters = {f"{stage}.weight": self._modules[stage].weight for stage in held}

    def step(self) -> Tensor | None:
        self._losses = []
        for run in self._steps:
            run()
        return self._total() if self._last in self._program.placement.stages_of[self._rank] else None

    def close(self) -> None:
        for descriptor in self._pipes.values():
            os.close(descriptor)

    def _bind(self, action: Action) -> Callable[[], None]:
        key = (action.stage, action.microbatch)
        match action.op:
            case Op.F:
                return lambda: self._forward(*key)
            case Op.B:
                return lambda: self._backward(*key)
            case Op.I:
                return lambda: self._input_backward(*key)
            case Op.W:
                return lambda: self._split.pop(key).accumulate()
            case Op.SEND_F | Op.SEND_B:
                pipe = self._pipe(self._rank, peer_of(action, self._program.placement), action.op is Op.SEND_F)
                return lambda: self._send(pipe, self._leaving.pop(key))
            case Op.RECV_F | Op.RECV_B:
                forward = action.op is Op.RECV_F
                pipe = self._pipe(peer_of(action, self._program.placement), self._rank, forward)
                into = self._arrived if forward else self._gradients
                return lambda: into.__setitem__(key, self._receive(pipe))
            case Op.REDUCE_GRAD if meets(action):
                return lambda: self._reduce(action.stage)
        raise ValueError(f"no pipe carries {action}")

    def _forward(self, stage: int, microbatch: int) -> None:
        x = self._arrived.pop((stage, microbatch)).requires_grad_() if stage else self._inputs[microbatch]
        y = self._modules[stage](x)
        if stage == self._last:
            y = self._loss(y, self._targets[microbatch])
            self._losses.append(y.detach())
        else:
            self._hand_on(stage + 1, (stage, microbatch), y.detach(), self._arrived)
        self._saved[stage, microbatch] = (x, y)

    def _backward(self, stage: int, microbatch: int) -> None:
        x, y = self._saved.pop((stage, microbatch))
        run_backward((y,), (self._gradient(stage, microbatch),), False, False, (), True, True)
        if stage:
            assert x.grad is not None
            self._hand_on(stage - 1, (stage, microbatch), x.grad, self._gradients)

    def _input_backward(self, stage: int, microbatch: int) -> None:
        x, y = self._saved.pop((stage, microbatch))
        found, self._split[stage, microbatch] = backward_input(
            (root_of(y),), (self._gradient(stage, microbatch),), [x] if stage else []
        )
        if stage:
            assert found[0] is not None
            self._hand_on(stage - 1, (stage, microbatch), found[0], self._gradients)

    def _gradient(self, stage: int, microbatch: int) -> Tensor:
        return self._seed if stage == self._last else self._gradients.pop((stage, microbatch))

    def _hand_on(self, stage: int, made_by: tuple[int, int], tensor: Tensor, here: dict[_Key, Tensor]) -> None:
        """A result goes to `stage`: to this rank's own, or to the SEND."""
        _, microbatch = made_by
        if self._program.placement.rank_of(stage, microbatch) == self._rank:
            here[stage, microbatch] = tensor
        else:
            self._leaving[made_by] = tensor

    # Pipes

    def _pipe(self, source: int, target: int, forward: bool) -> int:
        path = f"{self._path}-{source}-{target}-{'f' if forward else 'b'}"
        if path not in self._pipes:
            with suppress(FileExistsError):
                os.mkfifo(path)
            self._pipes[path] = os.open(path, os.O_RDWR)  # at once, whichever of the two ranks comes first
        return self._pipes[path]

    @staticmethod
    def _send(pipe: int, tensor: Tensor) -> None:
        os.write(pipe, tensor.numpy().tobytes())

    @staticmethod
    def _receive(pipe: int) -> Tensor:
        return torch.frombuffer(bytearray(os.read(pipe, 4 * _FLOATS)), dtype=torch.float32).view(1, _FLOATS)

    def _others(self, stage: int) -> list[int]:
        stages_of = self._program.placement.stages_of
        return [rank for rank in range(len(stages_of)) if stage in stages_of[rank] and rank != self._rank]

    def _exchange(self, stage: int, tensor: Tensor) -> Tensor:
        """The sum over the ranks that hold a stage."""
        others, size = self._others(stage), 4 * tensor.numel()
        for other in others:
            os.write(self._pipe(self._rank, other, True), tensor.numpy().tobytes())
        total = tensor.clone()
        for other in others:
            data = os.read(self._pipe(other, self._rank, True), size)
            total += torch.frombuffer(bytearray(data), dtype=torch.float32).view(tensor.shape)
        return total

    def _reduce(self, stage: int) -> None:
        parameter = self._modules[stage].weight
        parameter.grad = self._exchange(stage, parameter.grad)

    def _total(self) -> Tensor:
        total = torch.stack(self._losses).sum() * self._weight
        return self._exchange(self._last, total.reshape(1))[0] if self._others(self._last) else total
