"""Traced models: the overhead of a traced stage, and a step beside torch.distributed.pipelining's traced one.

Compared first: the traced stage has the loss and gradients of the module; the two pipelines have the same loss.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, environment, markdown, save, table
from benchmarks.common.statistics import ratio, spread
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.split import split

GOAL = 1.02  # of the overhead
SIZES = ((64, 32, 2), (128, 64, 4), (256, 128, 4))  # width, sequence length, samples of a micro-batch


def make_gpt(width: int, length: int) -> GPT:
    """A GPT of four layers, always with the same values."""
    model = GPT(GPTConfig(vocabulary_size=256, layers=4, width=width, heads=4, sequence_length=length))
    init_parameters(model, seed=1)
    return model


class ResidualNet(nn.Module):
    """Convolutions with batch norm and residual connections."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.layers = nn.ModuleList([nn.Conv2d(width, width, 3, padding=1) for _ in range(6)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width) for _ in range(6)])
        self.head = nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.relu(norm(layer(x)))
        return self.head(x.mean((2, 3)))


def _cases() -> dict[str, tuple[nn.Module, Tensor, Tensor, Any]]:
    generator = torch.Generator().manual_seed(2)
    cases: dict[str, tuple[nn.Module, Tensor, Tensor, Any]] = {}
    for width, length, samples in SIZES:
        tokens = torch.randint(0, 256, (samples, length + 1), generator=generator)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        cases[f"GPT, width {width}, {samples} x {length} tokens"] = make_gpt(width, length), inputs, targets, loss_fn
    images = torch.randn(8, 3, 16, 16, generator=generator)
    torch.manual_seed(3)
    cases["residual net, 8 images"] = ResidualNet(32), images, torch.arange(8), F.cross_entropy
    return cases


def _gradients(run: Any, module: nn.Module, inputs: Tensor, targets: Tensor, loss: Any) -> tuple[Tensor, list[Tensor]]:
    module.zero_grad()
    value = loss(run(inputs), targets)
    value.backward()
    return value.detach(), [p.grad.clone() for p in module.parameters() if p.grad is not None]


def measure_stage(num_rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """For each model, CPU seconds of forward and backward of the module and of its traced stage, round by round."""
    torch.set_num_threads(1)
    found = {}
    for name, (model, inputs, targets, loss) in _cases().items():
        reference = copy.deepcopy(model)
        stage = split(model, 1, example=inputs).modules[0]
        plain, ours = (_gradients(m, m, inputs, targets, loss) for m in (reference, stage))
        named = dict(stage.named_parameters())
        wanted = dict(reference.named_parameters())
        assert torch.equal(plain[0], ours[0]), name
        assert list(named) == list(wanted), name
        assert all(torch.allclose(named[key].grad, wanted[key].grad, atol=1e-5) for key in wanted), name
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(num_rounds + 2):
            for which in (0, 1) if number % 2 else (1, 0):
                run = (reference, stage)[which]
                begun = time.process_time()
                for _ in range(3):
                    loss(run(inputs), targets).backward()
                times[which].append((time.process_time() - begun) / 3)
        found[name] = times[0][2:], times[1][2:]
    return found


class Pipelines:
    """One rank of both pipelines: the same GPT, cut at the same blocks, by 1F1B over gloo."""

    def __init__(self, rank: int, width: int, length: int, samples: int, num_microbatches: int) -> None:
        torch.set_num_threads(1)
        size = dist.get_world_size()
        self._rank, self._size = rank, size
        generator = torch.Generator().manual_seed(4)
        tokens = torch.randint(0, 256, (samples * num_microbatches, length + 1), generator=generator)
        self._inputs, self._targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        cuts = [f"blocks.{4 * stage // size}" for stage in range(1, size)]
        example = self._inputs[:samples]
        schedule = pl.schedules.one_f_one_b(num_ranks=size, num_microbatches=num_microbatches)
        self._ours = {
            name: pl.Pipeline(
                make_gpt(width, length), schedule, loss_fn=loss_fn, example=example, cut=cuts, transport=transport
            )
            for name, transport in (("auto", "auto"), ("gloo", "torch"))
        }
        from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

        traced = pipeline(
            make_gpt(width, length), mb_args=(example,), split_spec=dict.fromkeys(cuts, SplitPoint.BEGINNING)
        )
        self._stage = traced.build_stage(rank, torch.device("cpu"))
        self._theirs = Schedule1F1B(self._stage, num_microbatches, loss_fn=loss_fn)

    def step(self, system: str) -> tuple[float, float | None]:
        """Seconds of a step, and its loss where it is known."""
        dist.barrier()
        begun = time.perf_counter()
        if system == "torch":
            losses: list[Tensor] = []
            first, last = self._rank == 0, self._rank == self._size - 1
            self._theirs.step(
                *((self._inputs,) if first else ()),
                **({"target": self._targets, "losses": losses} if last else {}),
            )
            value = float(torch.stack(losses).mean().detach()) if last else None
        else:
            value = float(self._ours[system].step(self._inputs, self._targets))
        return time.perf_counter() - begun, value

    def close(self) -> None:
        for pipe in self._ours.values():
            pipe.close()


def measure_pipelines(
    num_rounds: int, num_ranks: int = 2, num_microbatches: int = 8
) -> dict[str, dict[str, list[float]]]:
    """For each size, seconds per step of each system, round by round; a step is as long as on its slowest rank."""
    found: dict[str, dict[str, list[float]]] = {}
    for width, length, samples in SIZES[1:2]:
        crew = Crew("pipelines", num_ranks, Pipelines, width, length, samples, num_microbatches)
        try:
            losses = {name: crew.call("step", name)[-1][1] for name in ("auto", "gloo", "torch")}
            assert max(losses.values()) - min(losses.values()) < 1e-5, losses
            times: dict[str, list[float]] = {name: [] for name in losses}
            for number in range(num_rounds + 1):
                names = list(times)
                for name in names[number % 3 :] + names[: number % 3]:
                    times[name].append(max(seconds for seconds, _ in crew.call("step", name)))
            found[f"GPT, width {width}, {samples} x {length} tokens"] = {k: v[1:] for k, v in times.items()}
        finally:
            crew.close()
    return found


def report(stages: dict[str, Any], pipelines: dict[str, Any]) -> Parts:
    """The tables."""
    rows = [
        (name, *(spread(times).show("{:.2f}", 1e3) for times in both), ratio(both[1], both[0]).show("{:.3f}"))
        for name, both in stages.items()
    ]
    beside = [
        (
            name,
            *(spread(times[key]).show("{:.1f}", 1e3) for key in ("auto", "gloo", "torch")),
            ratio(times["auto"], times["torch"]).show("{:.2f}"),
            ratio(times["gloo"], times["torch"]).show("{:.2f}"),
        )
        for name, times in pipelines.items()
    ]
    return [
        f"CPU time of forward and backward: a traced stage beside the plain module (goal: at most {GOAL}).",
        table(("model", "module, ms", "traced stage, ms", "traced / module"), rows),
        "A step of two processes, 1F1B, 8 micro-batches, the same cuts: seconds of the slower rank.",
        table(
            (
                "model",
                "pipeloom, shared memory, ms",
                "pipeloom, gloo, ms",
                "torch, gloo, ms",
                "shared memory / torch",
                "gloo / torch",
            ),
            beside,
        ),
    ]


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()) / "traced.json")
    arguments = parser.parse_args()
    stages, pipelines = measure_stage(arguments.rounds), measure_pipelines(arguments.rounds)
    parts = report(stages, pipelines)
    save(arguments.output, vars(arguments) | {"output": ""}, environment(), [stages, pipelines], parts)
    print(markdown(parts))


if __name__ == "__main__":
    main()
