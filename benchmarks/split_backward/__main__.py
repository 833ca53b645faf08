"""What it costs to split a backward: I and W over B for transformer blocks, ours beside torch.distributed.pipelining's.

One thread computes all of it, so CPU time of the thread is what counts: it leaves out what other processes take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.common.births import Births
from benchmarks.common.reference import TOLERANCE
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import ratio, spread
from benchmarks.common.workloads import Block
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from pipeloom.autograd.split_backward import backward_input
from pipeloom.processes.host_memory import keep_freed_memory

WIDTHS = (64, 256, 512)
TOKENS = ((1, 64), (4, 64))


class Checkpointed(Block):
    """A block that is computed again in the backward; counts how often."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            self.calls += 1
            return Block.forward(self, x)

        return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]


class Case(NamedTuple):
    """One kind of block on micro-batches of one size."""

    width: int
    samples: int
    length: int
    checkpointed: bool

    def __str__(self) -> str:
        return f"{self.width}, {self.samples} x {self.length}" + (", checkpointed" if self.checkpointed else "")

    def block(self) -> Block:
        torch.manual_seed(7)
        block = (Checkpointed if self.checkpointed else Block)(self.width, 8)
        for parameter in block.parameters():  # gradients add to gradients, as in every micro-batch but the first
            parameter.grad = torch.zeros_like(parameter)
        return block

    def inputs(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.samples, self.length, self.width)
        x, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        return x.requires_grad_(), gradient


Backward = tuple[Tensor | None, Callable[[], object]]  # the gradient of the input, and W


def full(block: nn.Module, x: Tensor, outputs: list[Tensor], gradient: Tensor) -> Backward:
    torch.autograd.backward(outputs, [gradient])
    found, x.grad = x.grad, None
    return found, lambda: None


def ours(block: nn.Module, x: Tensor, outputs: list[Tensor], gradient: Tensor) -> Backward:
    edge = get_gradient_edge(outputs.pop())
    (found,), rest = backward_input([edge], [gradient], [x])
    return found, rest.accumulate


def torchs(block: nn.Module, x: Tensor, outputs: list[Tensor], gradient: Tensor) -> Backward:
    (found,), groups = stage_backward_input(outputs, [gradient], [x], block.parameters())
    x.grad = None
    return found, lambda: stage_backward_weight(block.parameters(), groups)


SYSTEMS = {"B": full, "pipeloom": ours, "torch": torchs}


def compare(case: Case) -> dict[str, float]:
    """The largest error of any gradient against B's, relative to that gradient's largest element.

    Raises:
        AssertionError: it is above the tolerance.
    """
    x, gradient = case.inputs()
    expected: list[Tensor] = []
    errors = {}
    for name, system in SYSTEMS.items():
        block = case.block()
        found, finish = system(block, x, [block(x)], gradient)
        finish()
        assert found is not None
        tensors = [found] + [p.grad for p in block.parameters() if p.grad is not None]
        expected = expected or tensors
        pairs = zip(tensors, expected, strict=True)
        errors[name] = max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)
        if errors[name] > TOLERANCE:
            raise AssertionError(f"{name}, block {case}: a gradient differs from B's by {errors[name]:.2e} (relative)")
    return errors


def measure(case: Case, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds of I (or B) and of W, by system and round; every round starts with another system."""
    block, (x, gradient) = case.block(), case.inputs()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    names = list(SYSTEMS)
    for k in range(-2, num_rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            outputs = [block(x)]
            start = time.thread_time()
            _, finish = SYSTEMS[name](block, x, outputs, gradient)
            middle = time.thread_time()
            finish()
            if k >= 0:
                seconds[name].append((middle - start, time.thread_time() - middle))
            del outputs, finish, _
    return seconds


def held(case: Case, name: str) -> dict[str, int]:
    """Bytes held between F and I, and between I and W; how often a checkpointed block was computed again."""
    block, (x, gradient) = case.block(), case.inputs()
    gradients = [parameter.grad for parameter in block.parameters() if parameter.grad is not None]
    with Births([x, gradient, *block.parameters(), *gradients]) as births:
        outputs = [block(x)]
        after_forward = births.alive_bytes()
        found, finish = SYSTEMS[name](block, x, outputs, gradient)
        del outputs, found
        between = births.alive_bytes()
        finish()
    recomputations = block.calls - 1 if isinstance(block, Checkpointed) else 0
    return {"after_forward": after_forward, "between": between, "recomputations": recomputations}


def tables(results: dict[str, Any]) -> Parts:
    rows, memory = [], []
    for label, result in results.items():
        whole = [i + w for i, w in result["seconds"]["B"]]
        row = [label, spread(whole).show("{:.2f}", 1e3)]
        for name in ("pipeloom", "torch"):
            parts = result["seconds"][name]
            row.append(ratio([i + w for i, w in parts], whole).show())
            row.append(ratio([i for i, _ in parts], whole).show())
        rows.append(row)
        mebibytes = [f"{result['held']['B']['after_forward'] / 2**20:.2f}"]
        for name in ("pipeloom", "torch"):
            mebibytes.append(f"{result['held'][name]['between'] / 2**20:.2f}")
        counts = [result["held"][name]["recomputations"] for name in SYSTEMS]
        memory.append([label, *mebibytes, *counts])
    header = ("width, micro-batch", "B in ms", "pipeloom: I+W over B", "I over B", "torch: I+W over B", "I over B")
    columns = ("MiB from F to I", "from I to W: pipeloom", "torch", "recomputations in B", "pipeloom", "torch")
    return [
        table(header, rows),
        "CPU time of one thread, median (quartiles) of ratios within rounds.",
        table((header[0], *columns), memory),
        "Without the input, the output's gradient and the parameters.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split_backward", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "split_backward.json")
    arguments = parser.parse_args()
    machine = environment()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in every rank; else whose turn it is decides who faults in the pages of gradients again
    results = {}
    for checkpointed in (False, True):
        for width in arguments.widths:
            for samples, length in TOKENS:
                case = Case(width, samples, length, checkpointed)
                results[str(case)] = {
                    "errors": compare(case),
                    "held": {name: held(case, name) for name in SYSTEMS},
                    "seconds": measure(case, arguments.rounds),
                }
    parts = tables(results)
    print(markdown(parts))
    save(arguments.output, {"rounds": arguments.rounds}, machine, results, parts)


if __name__ == "__main__":
    main()
