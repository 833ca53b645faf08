"""The global batch, the part of it that a copy of the pipeline trains on, and two updates by one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.common.reference import Sequential
from benchmarks.common.workloads import Workload
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NUM_UPDATES = 2  # before results are compared
TOLERANCE = 1e-4  # float32, relative to the largest change that the updates made to a parameter


@dataclass(frozen=True, kw_only=True)
class Part:
    """The samples of one of `count` copies; model and loss are those of the whole workload."""

    whole: Workload
    index: int
    count: int

    @property
    def num_microbatches(self) -> int:
        return self.whole.num_microbatches // self.count

    def model(self) -> nn.Sequential:
        return self.whole.model()

    def batch(self) -> tuple[Tensor, Tensor]:
        inputs, targets = (tensor.chunk(self.count)[self.index] for tensor in self.whole.batch())
        return inputs, targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return self.whole.loss(output, target)

    def cut(self, num_stages: int) -> list[int]:
        return self.whole.cut(num_stages)

    def without_waits(self) -> Part:
        return self


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, the same for everybody.

    Its epsilon is of the size of the gradients, so that an update follows the scale of a gradient too: with a smaller
    one a sum over copies in place of a mean would make the same update, and elements whose gradient is a rounding error
    would move as far as all others.
    """
    return torch.optim.AdamW(parameters, lr=0.1, eps=1e-2)


def write_reference(workload: Workload, path: Path) -> None:
    """Losses and weights of `NUM_UPDATES` updates on the global batch, in this process with one thread."""
    torch.set_num_threads(1)
    system = Sequential(workload)
    optimizer = make_optimizer(list(system.parameters.values()))
    losses = []
    for _ in range(NUM_UPDATES):
        losses.append(system.step())
        optimizer.step()
        optimizer.zero_grad()
    save_file({"losses": torch.stack(losses), **{n: p.detach() for n, p in system.parameters.items()}}, path)


def compare(workload: Workload, weights: dict[str, Tensor], path: Path) -> dict[str, float]:
    """For each parameter, the largest error after the updates over the largest change that they should have made."""
    reference = load_file(path)
    errors = {}
    for name, parameter in workload.model().named_parameters():
        if name in weights:
            change = (reference[name] - parameter.detach()).abs().max()
            errors[name] = float((weights[name] - reference[name]).abs().max() / change)
    return errors


def judge(workload: Workload, answers: list[tuple[list[float | None], dict[str, float]]], path: Path) -> float:
    """The largest error of losses and weights over all processes, which hold every parameter together.

    Args:
        answers: by process, its losses (of its copy's samples or of all; None where it has none), and what `compare`
            returned.
    """
    expected = load_file(path)["losses"].tolist()
    worst = 0.0
    for k, loss in enumerate(expected):
        known = [losses[k] for losses, _ in answers if losses[k] is not None]
        assert known, "no process has the loss"
        worst = max(worst, abs(sum(known) / len(known) - loss) / loss)  # type: ignore[arg-type]
    missing = {name for name, _ in workload.model().named_parameters()} - {n for _, errors in answers for n in errors}
    assert not missing, f"no process has {sorted(missing)}"
    return max(worst, *(error for _, errors in answers for error in errors.values()))
