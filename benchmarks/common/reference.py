"""One process without a pipeline: the reference that results are compared with, and the honest baseline."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.common.workloads import Workload
from pipeloom.processes.host_memory import keep_freed_memory

TOLERANCE = 1e-5  # float32, relative to the largest element of each gradient


class Sequential:
    """Plain gradient accumulation, or the whole batch at once; `keeps_memory`: with the allocator set as in a rank."""

    def __init__(self, workload: Workload, *, whole_batch: bool = False, keeps_memory: bool = False) -> None:
        if keeps_memory:
            keep_freed_memory()
        self._model = workload.model()
        self._loss = workload.loss
        pieces = 1 if whole_batch else workload.num_microbatches
        inputs, targets = workload.batch()
        self._microbatches = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        self.parameters = dict(self._model.named_parameters())

    def step(self) -> Tensor:
        total = torch.zeros(())
        for inputs, targets in self._microbatches:
            loss = self._loss(self._model(inputs), targets) / len(self._microbatches)
            loss.backward()
            total += loss.detach()
        return total

    def close(self) -> None:
        pass


class BareStages:
    """The calls that a pipeline of these stages cannot do without, in one process: modules, loss, autograd's engine.

    Micro-batch by micro-batch; between stages the graph is cut, as it is between ranks. The engine is called without
    the checks of `torch.autograd.backward`, so that this is a floor for everybody.
    """

    def __init__(self, workload: Workload) -> None:
        model = workload.model()
        self._stages = list(model)
        self._loss = workload.loss
        M = workload.num_microbatches
        inputs, targets = workload.batch()
        self._microbatches = list(zip(inputs.chunk(M), targets.chunk(M), strict=True))
        self._seed = torch.tensor(1.0 / M)
        self.parameters = dict(model.named_parameters())

    def step(self) -> Tensor:
        run_backward = torch.autograd.Variable._execution_engine.run_backward  # type: ignore[attr-defined]
        losses = []
        for x, target in self._microbatches:
            inputs: list[Tensor] = []
            outputs: list[Tensor] = []
            for stage in self._stages:
                if outputs:
                    x = outputs[-1].detach().requires_grad_()
                inputs.append(x)
                outputs.append(stage(x))
            loss = self._loss(outputs[-1], target)
            outputs[-1] = loss
            gradient: Tensor | None = self._seed
            for x, output in zip(reversed(inputs), reversed(outputs), strict=True):
                run_backward((output,), (gradient,), False, False, (), True, True)
                gradient = x.grad
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def close(self) -> None:
        pass


def write_reference(workload: Workload, path: Path) -> None:
    """Loss and gradients of one step of `workload`, computed in this process with one thread, as ranks do."""
    torch.set_num_threads(1)
    system = Sequential(workload.without_waits())
    tensors = {"loss": system.step()}
    for name, parameter in system.parameters.items():
        assert parameter.grad is not None
        tensors[name] = parameter.grad
    save_file(tensors, path)


def compare(loss: Tensor | None, parameters: dict[str, nn.Parameter], path: Path) -> dict[str, float]:
    """The largest errors of this rank's loss and gradients against the reference; names it holds come back as keys.

    Returns:
        For every parameter, and for ``"loss"`` where this rank has it, the relative error.
    """
    reference = load_file(path)
    errors = {}
    if loss is not None:
        errors["loss"] = abs(float(loss) - float(reference["loss"])) / abs(float(reference["loss"]))
    for name, parameter in parameters.items():
        expected = reference[name]
        if parameter.grad is None:
            errors[name] = float("inf")
        else:
            errors[name] = float((parameter.grad - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return errors


def judge(system: str, errors_by_rank: list[dict[str, float]], workload: Workload) -> float:
    """The largest error over all ranks.

    Raises:
        AssertionError: a parameter belongs to no rank, no rank has the loss, or an error is above `TOLERANCE`.
    """
    merged: dict[str, float] = {}
    for errors in errors_by_rank:
        for name, error in errors.items():
            merged[name] = max(error, merged.get(name, 0.0))
    missing = {"loss", *(name for name, _ in workload.model().named_parameters())} - merged.keys()
    worst = max(merged, key=lambda name: merged[name])
    if missing:
        raise AssertionError(f"{system}: no rank has {sorted(missing)}")
    if not merged[worst] <= TOLERANCE:
        raise AssertionError(f"{system}: {worst} differs from the reference by {merged[worst]:.2e} (relative)")
    return merged[worst]
