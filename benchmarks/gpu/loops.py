"""A pipeline beside the plain loop: one stage, several ranks on one device, CUDA graphs, and torch's own pipelines."""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.common.peers import TORCH_SCHEDULES
from benchmarks.common.statistics import ratio
from benchmarks.gpu.subject import (
    Figure,
    Machine,
    Sizes,
    Step,
    difference,
    in_rounds,
    medians,
    peaks,
    plain_loop,
    single,
)
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.models import loss_fn


def one_stage(machine: Machine) -> Iterator[Figure]:
    """Time and peak memory of a pipeline of one stage, with updates, over the plain loop."""
    for samples in (1, 8):
        sizes = Sizes(layers=24, width=2048, heads=16, length=2048, samples=samples, microbatches=4, tied=True).on(
            machine
        )
        model, batch = sizes.model(machine.device), sizes.batch(machine.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=machine.device.type == "cuda")
        loop = plain_loop(model, *batch, sizes.microbatches)
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=sizes.microbatches)
        with pl.Pipeline(model, schedule, loss_fn=loss_fn) as pipe:
            error = difference(model, loop, lambda pipe=pipe, batch=batch: pipe.step(*batch))

            def plain(loop: Step = loop, optimizer: torch.optim.Optimizer = optimizer) -> None:
                loop()
                optimizer.step()

            def ours(pipe: Any = pipe, batch: Any = batch, optimizer: torch.optim.Optimizer = optimizer) -> None:
                pipe.step(*batch)
                optimizer.step()

            systems = {"plain": plain, "pipeloom": ours}
            seconds = in_rounds(machine, systems, before=optimizer.zero_grad)
            most = peaks(machine, systems, optimizer.zero_grad)
        yield Figure("one_stage", f"{sizes}: ms per plain step", medians(seconds["plain"]), "{:.1f}")
        yield Figure(
            "one_stage", f"{sizes}: time over plain", ratio(seconds["pipeloom"], seconds["plain"]), target=1.01
        )
        share = single(most["pipeloom"] / most["plain"])
        yield Figure("one_stage", f"{sizes}: peak over plain, {most['plain'] / 2**30:.1f} GiB", share, target=1.01)
        yield Figure("one_stage", f"{sizes}: difference of gradients", single(error), "{:.1e}")
        del model, optimizer, loop, pipe, plain, ours, systems
        machine.free()


def ranks(machine: Machine) -> Iterator[Figure]:
    """Several ranks in one process on one device over the plain loop: the same work, cut into stages."""
    sizes = Sizes(layers=8, width=2048, heads=16, length=2048, samples=2, microbatches=8).on(machine)
    model, batch = sizes.model(machine.device), sizes.batch(machine.device)
    loop = plain_loop(model, *batch, sizes.microbatches)
    systems: dict[str, Step] = {"plain": loop}
    with ExitStack() as stack:
        for name, num_ranks, transport in (
            ("1f1b", 2, "loopback"),
            ("1f1b", 4, "loopback"),
            ("zb-h1", 2, "loopback"),
            ("zb-h1", 4, "loopback"),
            ("1f1b", 2, "threads"),
            ("1f1b", 4, "threads"),
            ("zb-h1", 4, "threads"),
        ):
            schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=sizes.microbatches)
            made = pl.Pipeline(model, schedule, loss_fn=loss_fn, transport=transport)
            pipe = stack.enter_context(made)
            key = f"{name}, {num_ranks} ranks, {transport}"
            systems[key] = lambda pipe=pipe: pipe.step(*batch)
            difference(model, loop, systems[key])
        seconds = in_rounds(machine, systems, before=model.zero_grad)
    yield Figure("ranks", f"{sizes}: ms per plain step", medians(seconds["plain"]), "{:.1f}")
    for key in systems:
        if key != "plain":
            yield Figure("ranks", f"{key}: time over plain", ratio(seconds[key], seconds["plain"]), target=1.05)


def graphs(machine: Machine) -> Iterator[Figure]:
    """Small layers, where the host is the bottleneck: the plain loop over a pipeline that replays CUDA graphs."""
    sizes = Sizes(layers=24, width=512, heads=8, length=256, samples=1, microbatches=8, vocabulary=8192).on(machine)
    model, batch = sizes.model(machine.device), sizes.batch(machine.device)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=sizes.microbatches)
    loop = plain_loop(model, *batch, sizes.microbatches)
    systems: dict[str, Step] = {"plain": loop}
    with ExitStack() as stack:
        for key in ("eager", "graphs") if machine.device.type == "cuda" else ("eager",):
            made = pl.Pipeline(model, schedule, loss_fn=loss_fn, graphs=key == "graphs")
            pipe = stack.enter_context(made)
            systems[key] = lambda pipe=pipe: pipe.step(*batch)
            for _ in range(3):  # the third is recorded
                systems[key]()
            error = difference(model, loop, systems[key])
            yield Figure("graphs", f"{key}: difference of gradients", single(error), "{:.1e}")
        seconds = in_rounds(machine, systems, before=model.zero_grad)
    yield Figure("graphs", f"{sizes}: ms per plain step", medians(seconds["plain"]), "{:.2f}")
    for key, values in seconds.items():
        if key != "plain":
            target = 1.5 if key == "graphs" else None
            yield Figure("graphs", f"plain over {key}", ratio(seconds["plain"], values), target=target, at_least=True)
    if machine.device.type == "cuda":  # the same model without a pipeline: what graphs alone can reach
        twin = copy.deepcopy(model)
        torch.cuda.make_graphed_callables(twin, (batch[0][: sizes.samples],))
        systems = {"plain": loop, "torch": plain_loop(twin, *batch, sizes.microbatches)}
        seconds = in_rounds(machine, systems, before=model.zero_grad, warm_up=3)
        yield Figure("graphs", "plain over make_graphed_callables", ratio(seconds["plain"], seconds["torch"]))


@contextmanager
def _group() -> Iterator[None]:
    """A process group of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="pipeloom-benchmark-") as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60))
        try:
            yield
        finally:
            dist.destroy_process_group()


def _torch_step(
    model: nn.Sequential, cut: list[int], name: str, batch: tuple[Tensor, Tensor], microbatches: int
) -> Callable[[], object]:
    from torch.distributed import pipelining
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    ends, device = list(accumulate(cut, initial=0)), batch[0].device
    stages = [
        pipelining.PipelineStage(model[ends[s] : ends[s + 1]], s, len(cut), device, group=dist.group.WORLD)
        for s in range(len(cut))
    ]
    make = getattr(pipelining, TORCH_SCHEDULES[name])
    several = issubclass(make, PipelineScheduleMulti)
    schedule = make(stages if several else stages[0], n_microbatches=microbatches, loss_fn=loss_fn)
    options = {"return_outputs": False} if "return_outputs" in inspect.signature(schedule.step).parameters else {}
    return lambda: schedule.step(batch[0], target=batch[1], losses=[], **options)


def torch_peer(machine: Machine) -> Iterator[Figure]:
    """One rank with 1, 2 and 4 stages, beside torch.distributed.pipelining on the same modules."""
    for samples, length in ((1, 512), (4, 2048)):
        sizes = Sizes(layers=8, width=1024, heads=16, length=length, samples=samples, microbatches=8).on(machine)
        gpt, batch = sizes.model(machine.device), sizes.batch(machine.device)
        model = nn.Sequential(gpt.embedding, *gpt.blocks, nn.Sequential(gpt.norm, gpt.head))
        loop = plain_loop(model, *batch, sizes.microbatches)
        systems: dict[str, Step] = {"plain": loop}
        with _group(), ExitStack() as stack:
            for num_stages in (1, 2, 4):
                cut = [sizes.layers // num_stages] * num_stages
                cut[0] += 1  # the embedding
                cut[-1] += 1  # the head
                name = "1f1b" if num_stages == 1 else "interleaved"
                schedule = pl.schedules.build(
                    name, num_ranks=1, num_microbatches=sizes.microbatches, num_chunks=num_stages
                )
                pipe = stack.enter_context(pl.Pipeline(model, schedule, loss_fn=loss_fn, cut=cut, transport="loopback"))
                systems[f"pipeloom {num_stages}"] = lambda pipe=pipe, batch=batch: pipe.step(*batch)
                if machine.device.type == "cuda":
                    recorded = stack.enter_context(
                        pl.Pipeline(model, schedule, loss_fn=loss_fn, cut=cut, transport="loopback", graphs=True)
                    )
                    systems[f"graphs {num_stages}"] = lambda pipe=recorded, batch=batch: pipe.step(*batch)
                systems[f"torch {num_stages}"] = _torch_step(model, cut, name, batch, sizes.microbatches)
                for system in ("pipeloom", "torch"):
                    difference(model, loop, systems[f"{system} {num_stages}"])
            seconds = in_rounds(machine, systems, before=model.zero_grad, warm_up=3)
        yield Figure("torch", f"{sizes}: ms per plain step", medians(seconds["plain"]), "{:.1f}")
        for n in (1, 2, 4):
            both = ratio(seconds[f"pipeloom {n}"], seconds[f"torch {n}"])
            what = f"{samples} x {length:,}, {n} stages"
            yield Figure("torch", f"{what}: time over torch's", both, target=0.97)
            limit = ratio(seconds["plain"], seconds[f"torch {n}"])
            yield Figure("torch", f"{what}: plain loop over torch's", limit)
            if f"graphs {n}" in seconds:
                both = ratio(seconds[f"graphs {n}"], seconds[f"torch {n}"])
                yield Figure("torch", f"{what}: with graphs, time over torch's", both, target=0.97)
        del gpt, model, loop, systems, pipe
        machine.free()
