"""What less memory costs in time: recomputation, activations, optimizer states and parameters in a file."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.common.births import Births
from benchmarks.common.report import Table, environment, markdown, save, table
from benchmarks.common.statistics import ratio, spread
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.processes.host_memory import keep_freed_memory

NUM_MICROBATCHES = 8
KEPT = 3  # activations in memory where the others are in a file


def pipelines(config: GPTConfig, directory: str, stack: ExitStack) -> dict[str, pl.Pipeline]:
    """One rank each, all micro-batches in flight: as much to keep as a first stage has."""
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=NUM_MICROBATCHES)
    away = pl.OffloadActivations(f"disk:{directory}", most=KEPT)
    ways: dict[str, dict[str, Any]] = {
        "everything kept": {},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
        f"all but {KEPT} in a file": {"offload": away},
        "full, and in a file": {"recompute": "full", "offload": away},
    }
    found = {}
    for name, options in ways.items():
        model = GPT(config)
        init_parameters(model, seed=1)
        pipe = pl.Pipeline(model, schedule, loss_fn=loss_fn, transport="loopback", **options)
        found[name] = stack.enter_context(pipe)
    return found


Seconds = dict[str, list[float]]


def time_steps(pipes: dict[str, pl.Pipeline], batch: tuple[Tensor, Tensor], num_rounds: int) -> tuple[Seconds, Seconds]:
    """Seconds of a step, and CPU seconds of the thread that computes, by way; every round starts with another way."""
    names = list(pipes)
    seconds: Seconds = {name: [] for name in names}
    computing: Seconds = {name: [] for name in names}
    for k in range(-1, num_rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start, cpu_start = time.perf_counter(), time.thread_time()
            pipes[name].step(*batch)
            if k >= 0:
                seconds[name].append(time.perf_counter() - start)
                computing[name].append(time.thread_time() - cpu_start)
    return seconds, computing


def measure_steps(arguments: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    config = GPTConfig(
        layers=arguments.layers, width=arguments.width, heads=8, sequence_length=256, tie_embeddings=False
    )
    tokens = torch.randint(0, 256, (4 * NUM_MICROBATCHES, 257), generator=torch.Generator().manual_seed(1))
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory, ExitStack() as stack:
        pipes = pipelines(config, directory, stack)
        expected: list[Tensor] = []
        peaks, moved = {}, {}
        for name, pipe in pipes.items():  # numbers first, to the last bit
            result = [pipe.step(*batch), *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]
            expected = expected or result
            if not all(torch.equal(a, b) for a, b in zip(result, expected, strict=True)):
                raise AssertionError(f"{name}: loss or gradients differ from those with everything kept")
            before = pipe.memory.offload_traffic.moved_bytes
            with Births([*pipe.parameters(), *result], watch_peak=True) as births:
                pipe.step(*batch)
            peaks[name], moved[name] = births.peak, pipe.memory.offload_traffic.moved_bytes - before
        waited = {name: pipe.memory.offload_traffic.wait_seconds for name, pipe in pipes.items()}
        seconds, computing = time_steps(pipes, batch, arguments.rounds)
        waits = {
            name: (pipe.memory.offload_traffic.wait_seconds - waited[name]) / (arguments.rounds + 1)
            for name, pipe in pipes.items()
        }
    plain = next(iter(pipes))
    rows = [
        [
            name,
            f"{peaks[name] / 2**20:.0f}",
            f"{peaks[name] / peaks[plain]:.2f}",
            spread(values).show("{:.2f}"),
            ratio(values, seconds[plain]).show(),
            ratio(computing[name], computing[plain]).show(),
            f"{moved[name] / 2**20:.0f}",
            f"{waits[name]:.2f}",
        ]
        for name, values in seconds.items()
    ]
    header = ("activations", "peak MiB", "over all kept", "step in s", "over all kept", "CPU", "MiB moved", "s waited")
    results = {"peaks": peaks, "seconds": seconds, "computing": computing, "moved": moved, "waits": waits}
    return results, table(header, rows)


def measure_updates(arguments: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    """Updates of AdamW, with states in memory, in a file, and what the disk alone would take."""

    def parameters() -> list[nn.Parameter]:
        drawn = torch.Generator().manual_seed(2)
        made = [nn.Parameter(torch.randn(1024, 1024, generator=drawn)) for _ in range(arguments.matrices)]
        for parameter in made:
            parameter.grad = torch.randn(parameter.shape, generator=drawn)
        return made

    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        held = {name: parameters() for name in ("in memory", "in a file")}
        optimizers: dict[str, Any] = {name: torch.optim.AdamW(made, lr=1e-3, fused=True) for name, made in held.items()}
        away = optimizers["in a file"] = pl.OffloadedOptimizer(optimizers["in a file"], f"disk:{directory}")
        direct = away._mover.store._direct is not None
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.step()
        if not all(torch.equal(a, b) for a, b in zip(*held.values(), strict=True)):
            raise AssertionError("an update with states in a file differs from one with states in memory")
        before, waited = away.moved_bytes, away.wait_seconds
        seconds: dict[str, list[float]] = {name: [] for name in optimizers}
        for k in range(arguments.rounds):
            names = list(optimizers)[:: 1 if k % 2 else -1]
            for name in names:
                start = time.perf_counter()
                optimizers[name].step()
                seconds[name].append(time.perf_counter() - start)
                for portion in away._portions:  # what is still being written belongs to it
                    if name == "in a file" and portion.written is not None:
                        portion.written.result()
                if name == "in a file":
                    seconds[name][-1] = time.perf_counter() - start
        moved = (away.moved_bytes - before) / arguments.rounds
        waits = (away.wait_seconds - waited) / arguments.rounds
        states, buffers = away.offloaded_bytes, sum(buffer.numel() for buffer in away._buffers)
        away.close()
    memory, file = spread(seconds["in memory"]), spread(seconds["in a file"])
    rows = [
        ["in memory", f"{states / 2**20:.0f}", memory.show("{:.3f}"), "1.00", "-", "-"],
        [
            f"in a file{', direct I/O' if direct else ''}",
            f"{buffers / 2**20:.0f}",
            file.show("{:.3f}"),
            ratio(seconds["in a file"], seconds["in memory"]).show("{:.1f}"),
            f"{moved / 2**20 / median(seconds['in a file']):.0f}",
            f"{waits:.3f}",
        ],
    ]
    header = ("states of AdamW", "MiB in memory", "update in s", "over in memory", "MiB/s moved", "s waited")
    return {"seconds": seconds, "moved": moved, "states": states, "direct": direct}, table(header, rows)


def moved_bytes(pipe: pl.Pipeline, optimizer: Any) -> int:
    """Until now, with what is still being written."""
    for portion in getattr(optimizer, "_portions", ()):
        if portion.written is not None:
            portion.written.result()
    return pipe.memory.offload_traffic.moved_bytes + int(getattr(optimizer, "moved_bytes", 0))


def measure_parameters(arguments: argparse.Namespace) -> tuple[dict[str, Any], Table]:
    """Steps and updates of one copy under zero3, layer by layer: what is in a file, and what still is in memory."""
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=2)
    batch = torch.randn(4, 1024, generator=torch.Generator().manual_seed(3)), torch.zeros(4, 1024)
    held: dict[str, list[int]] = {}
    seconds: dict[str, list[float]] = {}
    values: list[list[Tensor]] = []
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        place = f"disk:{directory}"
        ways = {"nothing": (None, False), "states": (None, True), "states and parameters": (place, True)}
        for name, (offload, wraps) in ways.items():
            torch.manual_seed(4)
            model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(arguments.matrices)])
            data = pl.DataParallel("zero3", "microbatch", offload=offload)
            options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "data": data, "transport": "loopback"}
            with pl.Pipeline(model, schedule, **options) as pipe:
                plain = torch.optim.AdamW(pipe.parameters(), lr=1e-3, fused=True)
                optimizer: Any = pl.OffloadedOptimizer(plain, place) if wraps else plain
                seconds[name] = []
                for k in range(arguments.rounds + 1):
                    before = moved_bytes(pipe, optimizer)
                    start = time.perf_counter()
                    pipe.step(*batch)
                    optimizer.step()
                    optimizer.zero_grad()
                    if k:  # the first makes states
                        seconds[name].append(time.perf_counter() - start)
                moved = moved_bytes(pipe, optimizer) - before
                values.append([value.clone() for value in pipe.state_dict().values()])
                states = sum(v.nbytes for state in optimizer.state.values() for v in state.values())
                kept = pipe.memory.held_bytes().masters + states - getattr(optimizer, "offloaded_bytes", 0)
                buffers = sum(buffer.numel() for buffer in getattr(optimizer, "_buffers", ()))
                held[name] = [kept, pipe.memory.peak_bytes().gathered, buffers, moved]
                if wraps:
                    optimizer.close()
    if not all(torch.equal(a, b) for other in values[1:] for a, b in zip(values[0], other, strict=True)):
        raise AssertionError("parameters after updates differ from those with everything in memory")
    rows = [
        [name, *(f"{size / 2**20:.0f}" for size in sizes), spread(seconds[name]).show("{:.2f}")]
        for name, sizes in held.items()
    ]
    header = ("in a file", "MiB kept", "MiB gathered", "MiB of buffers", "MiB moved a step", "step and update in s")
    return {"seconds": seconds, "bytes": held}, table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--matrices", type=int, default=48, help="of 1024 x 1024, that are updated")
    parser.add_argument("--directory", help="where files are made; by default that of temporary files")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "offload.json")
    arguments = parser.parse_args()
    machine = environment()
    torch.set_num_threads(1)
    keep_freed_memory()  # as in every rank
    parts: list[Callable[[argparse.Namespace], tuple[dict[str, Any], Table]]] = [
        measure_steps,
        measure_updates,
        measure_parameters,
    ]
    results, tables = zip(*(part(arguments) for part in parts), strict=True)
    print(markdown(tables))
    save(arguments.output, {"rounds": arguments.rounds}, machine, results, tables)


if __name__ == "__main__":
    main()
