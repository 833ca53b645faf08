"""What is measured on a GPU: a GPT and its batch, the plain loop over micro-batches, rounds of steps, and results.

All systems of a case train the same modules with the same parameters. So a system costs no memory of its own between
steps, and the peak of a step is comparable.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from benchmarks.common.statistics import Cell, Spread, spread
from torch import Tensor

from pipeloom.models import GPT, GPTConfig, loss_fn

Step = Callable[[], object]


@dataclass(frozen=True)
class Machine:
    """Where and how long a case runs.

    Attributes:
        device: the device.
        tiny: whether sizes are a few, to try the code without a GPU.
        rounds: rounds of every comparison, at most.
        deadline: when the case stops to begin rounds (time.monotonic, seconds); each comparison has two at least.
    """

    device: torch.device
    tiny: bool
    rounds: int
    deadline: float

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 1

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class Figure(NamedTuple):
    """A row of the table.

    Attributes:
        case: the name of the case.
        what: what was measured.
        value: median and quartiles.
        pattern: its format.
        target: the bound; None: a figure to read the others by.
        at_least: whether the value is to be at least the target.
    """

    case: str
    what: str
    value: Spread
    pattern: str = "{:.3f}"
    target: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        return self.value.median >= self.target if self.at_least else self.value.median <= self.target

    def row(self) -> tuple[str, str, Cell, str, str]:
        """Cells of the table."""
        bound = "" if self.target is None else f"{'>=' if self.at_least else '<='} {self.target:g}"
        verdict = {None: "", True: "yes", False: "no"}[self.met]
        return self.case, self.what, self.value.show(self.pattern), bound, verdict


def single(value: float) -> Spread:
    """A value that was measured once."""
    return spread([value])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A GPT, and a batch of `microbatches` micro-batches of `samples` sequences of `length` tokens."""

    layers: int
    width: int
    heads: int
    length: int
    samples: int
    microbatches: int
    vocabulary: int = 50304
    tied: bool = False

    def on(self, machine: Machine) -> Sizes:
        """These sizes, or tiny ones."""
        if not machine.tiny:
            return self
        return Sizes(
            layers=min(self.layers, 4),
            width=32,
            heads=2,
            length=16,
            samples=min(self.samples, 2),
            microbatches=self.microbatches,
            vocabulary=64,
            tied=self.tied,
        )

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocabulary_size=self.vocabulary,
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            sequence_length=self.length,
            tie_embeddings=self.tied,
        )

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.samples * self.microbatches * self.length

    def __str__(self) -> str:
        count = self.config.num_parameters
        size = f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"
        return f"{size}, {self.microbatches} x {self.samples} x {self.length:,} tokens"

    def model(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> GPT:
        """Made where it trains: its values are drawn on the device."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                model = GPT(self.config)
        finally:
            torch.set_default_dtype(before)
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        return model

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        generator = torch.Generator().manual_seed(11)
        shape = (self.samples * self.microbatches, self.length + 1)
        row = torch.randint(self.vocabulary, shape, generator=generator).to(device)
        return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def plain_loop(model: torch.nn.Module, inputs: Tensor, targets: Tensor, microbatches: int) -> Callable[[], Tensor]:
    """Gradient accumulation as PyTorch's documentation writes it."""
    pieces = list(zip(inputs.tensor_split(microbatches), targets.tensor_split(microbatches), strict=True))

    def step() -> Tensor:
        total = torch.zeros((), device=inputs.device)
        for x, y in pieces:
            loss = loss_fn(model(x), y) / microbatches
            loss.backward()
            total += loss.detach()
        return total

    return step


Gradients = dict[str, Tensor | None]


def gradients_of(model: torch.nn.Module, step: Step) -> Gradients:
    """Those of one step, by parameter; the model keeps none."""
    model.zero_grad()
    step()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def difference(model: torch.nn.Module, expected: Step | Gradients, found: Step, bound: float = 0.03) -> float:
    """The largest error of a gradient of `found` against those of `expected`, relative to its norm; 0: bitwise equal.

    Raises:
        AssertionError: it is above `bound`, or a gradient is missing.
    """
    wanted = expected if isinstance(expected, dict) else gradients_of(model, expected)
    return largest_error(wanted, gradients_of(model, found), bound)


def largest_error(wanted: Gradients, found: Gradients, bound: float = 0.03) -> float:
    """See `difference`."""
    errors = []
    for name, gradient in wanted.items():
        other = found[name]
        assert gradient is not None, f"no gradient of {name}"
        assert other is not None, f"no gradient of {name}"
        exact = gradient.float()
        errors.append((other.float() - exact).norm() / exact.norm().clamp_min(1e-30))
    error = float(torch.stack(errors).max())
    assert error <= bound, f"a gradient differs by {error:.2e} of its norm; the bound is {bound}"
    return error


def in_rounds(
    machine: Machine, systems: Mapping[str, Step], *, warm_up: int = 1, before: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of a step, by system and round; every round begins with another system.

    Args:
        warm_up: rounds that do not count.
        before: runs before each step and is not timed.
    """
    names = list(systems)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for k in range(-warm_up, machine.rounds):
        if k >= 2 and time.monotonic() > machine.deadline:
            break
        for name in names[k % len(names) :] + names[: k % len(names)]:
            if before is not None:
                before()
            machine.synchronize()
            start = time.perf_counter()
            systems[name]()
            machine.synchronize()
            if k >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def peaks(machine: Machine, systems: Mapping[str, Step], before: Callable[[], None]) -> dict[str, int]:
    """Peak bytes of a step of every system."""
    found = {}
    for name, step in systems.items():
        before()
        machine.synchronize()
        machine.forget_peak()
        step()
        machine.synchronize()
        found[name] = machine.peak_bytes()
    return found


def medians(seconds: Sequence[float]) -> Spread:
    """In milliseconds."""
    return spread([value * 1e3 for value in seconds])
