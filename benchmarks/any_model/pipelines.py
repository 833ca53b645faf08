"""A step of a traced model's pipeline, beside that of torch.distributed.pipelining, with the same cuts.

Compared first: the losses.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from benchmarks.common.processes import Crew
from benchmarks.common.report import Parts, table
from benchmarks.common.statistics import Spread, ratio, spread
from torch import Tensor

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn

SYSTEMS = {"auto": "pipeloom, shared memory", "gloo": "pipeloom, gloo", "torch": "torch"}
SIZES = ((64, 32, 2), (128, 64, 4), (256, 128, 4))  # width, sequence length, samples of a micro-batch


def make_gpt(width: int, length: int) -> GPT:
    """A GPT of four layers, always with the same values."""
    model = GPT(GPTConfig(vocabulary_size=256, layers=4, width=width, heads=4, sequence_length=length))
    init_parameters(model, seed=1)
    return model


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
    for width, length, samples in SIZES[1:]:
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


def tables(pipelines: dict[str, dict[str, list[float]]]) -> Parts:
    """One row per model."""
    rows = [
        (
            name,
            *(spread(times[key]).show("{:.1f}", 1e3) for key in SYSTEMS),
            ratio(times["auto"], times["torch"]).show("{:.2f}"),
            ratio(times["gloo"], times["torch"]).show("{:.2f}"),
        )
        for name, times in pipelines.items()
    ]
    header = ["model", *(f"{name}, ms" for name in SYSTEMS.values()), "shared memory / torch", "gloo / torch"]
    return [
        "A step of a traced GPT in two processes, 1F1B, 8 micro-batches, cut at the same block: milliseconds of the "
        "slower rank, median (quartiles) over rounds, beside torch.distributed.pipelining's `pipeline()`.",
        table(header, rows),
    ]


def headlines(pipelines: dict[str, dict[str, list[float]]]) -> dict[str, Spread]:
    """Step time over that of torch's traced pipeline."""
    return {
        f"traced {name}: {SYSTEMS[key]} / torch": ratio(times[key], times["torch"])
        for name, times in pipelines.items()
        for key in ("auto", "gloo")
    }
