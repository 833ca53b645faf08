"""Split backwards, the share of the device's peak, and predicted memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from benchmarks.common.statistics import ratio, spread
from benchmarks.gpu.subject import (
    Figure,
    Machine,
    Sizes,
    difference,
    gradients_of,
    in_rounds,
    largest_error,
    medians,
    plain_loop,
    single,
)
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import pipeloom as pl
from pipeloom.autograd.split_backward import backward_input
from pipeloom.common.division import even_parts
from pipeloom.devices import device_of
from pipeloom.devices.graphs import CudaGraphs
from pipeloom.models import loss_fn
from pipeloom.parallel import Precision
from pipeloom.passes import lower, merge_backwards
from pipeloom.plan.memory import MemoryModel, gpt_layers, in_stages, memory_of_ranks

PEAK_FLOPS = 989e12  # dense bf16, by the data sheets of H100 SXM and H200
WIDE = Sizes(layers=4, width=4096, heads=32, length=2048, samples=8, microbatches=4, vocabulary=32768)


def split(machine: Machine) -> Iterator[Figure]:
    """I and W over B of a stage of blocks."""
    for samples, length in ((1, 2048), (8, 2048)):
        sizes = Sizes(layers=4, width=2048, heads=16, length=length, samples=samples, microbatches=1).on(machine)
        stage = nn.Sequential(*sizes.model(machine.device).blocks)
        shape = (sizes.samples, sizes.length, sizes.width)
        x, gradient = torch.randn(2, *shape, device=machine.device, dtype=torch.bfloat16)
        x.requires_grad_()

        def backward(*, halves: bool, stage: nn.Module = stage, x: Any = x, gradient: Any = gradient) -> float:
            x.grad = None
            output = stage(x)
            machine.synchronize()
            start = time.perf_counter()
            if halves:
                (x.grad,), rest = backward_input([get_gradient_edge(output)], [gradient], [x])
                rest.accumulate()
            else:
                torch.autograd.backward([output], [gradient])
            machine.synchronize()
            return time.perf_counter() - start

        error = difference(stage, lambda b=backward: b(halves=False), lambda b=backward: b(halves=True))
        for halves in (False, True):  # gradients add to gradients, as in every micro-batch but the first
            backward(halves=halves)
        whole, parts = [], []
        for k in range(-2, machine.rounds * 2):
            if k >= 2 and time.monotonic() > machine.deadline:
                break
            times = {halves: backward(halves=halves) for halves in ((False, True) if k % 2 else (True, False))}
            if k >= 0:
                whole.append(times[False])
                parts.append(times[True])
        if machine.device.type == "cuda":
            recorded = _recorded_halves(machine, stage, x, gradient)
            replayed = ratio(recorded[True], recorded[False])
            yield Figure("split", f"{samples} x {length:,}: I and W over B, recorded as graphs", replayed, target=1.03)
        yield Figure("split", f"4 blocks of {sizes.width}, {samples} x {length:,}: ms per B", medians(whole), "{:.2f}")
        yield Figure("split", f"{samples} x {length:,}: I and W over B", ratio(parts, whole), target=1.03)
        yield Figure("split", f"{samples} x {length:,}: difference of gradients", single(error), "{:.1e}")
        del stage, x, gradient, backward
        machine.free()


def _recorded_halves(machine: Machine, stage: nn.Module, x: Tensor, gradient: Tensor) -> dict[bool, list[float]]:
    """Seconds of replayed backwards: of B, and of I and W."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    device = device_of(machine.device)
    with device.computing(after=device.mark()):
        replays = {}
        for halves in (False, True):
            graphs, outputs = CudaGraphs(machine.device), []

            def backward(halves: bool = halves, outputs: list[Tensor] = outputs) -> None:
                x.grad = None
                if halves:
                    (x.grad,), rest = backward_input([get_gradient_edge(outputs.pop())], [gradient], [x])
                    rest.accumulate()
                else:
                    torch.autograd.backward([outputs.pop()], [gradient])

            for _ in range(2):
                outputs.append(stage(x))
                backward()
            forward = graphs.record(lambda outputs=outputs: outputs.append(stage(x)))
            replays[halves] = forward, graphs.record(backward)
        for k in range(-2, machine.rounds * 2):
            for halves in (False, True) if k % 2 else (True, False):
                forward, backwards = replays[halves]
                forward()
                machine.synchronize()
                start = time.perf_counter()
                backwards()
                machine.synchronize()
                if k >= 0:
                    seconds[halves].append(time.perf_counter() - start)
    x.grad = None
    return seconds


def _one_rank(sizes: Sizes) -> pl.Schedule:
    return pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=sizes.microbatches)


def flops_of_step(sizes: Sizes) -> float:
    """6 per parameter of a matrix and token, and the products of causal attention: half of all pairs of tokens."""
    table = sizes.vocabulary * sizes.width
    matrices = sizes.config.num_parameters - (0 if sizes.tied else table)  # a look-up multiplies nothing
    attention = 6 * sizes.layers * sizes.width * sizes.length
    return sizes.tokens * float(6 * matrices + attention)


def flops(machine: Machine) -> Iterator[Figure]:
    """The share of the peak of bf16 products that a training step reaches, compiled and not."""
    width = 64 if machine.tiny else 8192
    a, b = torch.randn(2, width, width, device=machine.device, dtype=torch.bfloat16)

    def multiply(a: Tensor = a, b: Tensor = b) -> None:
        for _ in range(10):
            torch.mm(a, b)

    products = in_rounds(machine, {"product": multiply})["product"]
    rate = [20 * width**3 / seconds / 1e12 for seconds in products]
    yield Figure("flops", f"a product of {width} x {width}: TFLOP/s", spread(rate), "{:.0f}")
    del a, b, multiply
    sizes = WIDE.on(machine)
    model, batch, schedule = sizes.model(machine.device), sizes.batch(machine.device), _one_rank(sizes)
    wanted = gradients_of(
        model, plain_loop(model, *batch, sizes.microbatches)
    )  # before the model's blocks are compiled
    for name in ("eager", "compiled"):
        with pl.Pipeline(model, schedule, loss_fn=loss_fn, compile=name == "compiled") as pipe:
            error = difference(model, wanted, lambda pipe=pipe: pipe.step(*batch), bound=0.1)
            seconds = in_rounds(machine, {name: lambda pipe=pipe: pipe.step(*batch)}, before=model.zero_grad)[name]
        share = [flops_of_step(sizes) / value / PEAK_FLOPS for value in seconds]
        what = f"{sizes}, width {sizes.width}, {name}: share of 989 TFLOP/s"
        yield Figure("flops", what, spread(share), target=0.55 if name == "compiled" else None, at_least=True)
        yield Figure("flops", f"{name}: difference of gradients", single(error), "{:.1e}")
        del pipe


def fp8(machine: Machine) -> Iterator[Figure]:
    """Products of 8 bits in the blocks, compiled, beside compiled blocks in bfloat16."""
    sizes = WIDE.on(machine)
    batch, schedule = sizes.batch(machine.device), _one_rank(sizes)
    systems, gradients = {}, {}
    with ExitStack() as stack:
        for name in ("bf16", "fp8"):
            model = sizes.model(machine.device)
            for block in model.blocks if name == "fp8" else ():
                pl.use_fp8(block)
            pipe = stack.enter_context(pl.Pipeline(model, schedule, loss_fn=loss_fn, compile=True))

            def step(pipe: Any = pipe, model: nn.Module = model) -> None:
                model.zero_grad()
                pipe.step(*batch)

            systems[name] = step
            gradients[name] = gradients_of(model, lambda pipe=pipe: pipe.step(*batch))
        error = largest_error(gradients["bf16"], gradients.pop("fp8"), bound=0.5)
        gradients.clear()
        seconds = in_rounds(machine, systems)
    yield Figure("fp8", f"{sizes}, width {sizes.width}: bf16 over fp8", ratio(seconds["bf16"], seconds["fp8"]))
    share = [flops_of_step(sizes) / value / PEAK_FLOPS for value in seconds["fp8"]]
    yield Figure("fp8", "share of 989 TFLOP/s", spread(share))
    yield Figure("fp8", "difference of gradients", single(error), "{:.1e}")


def memory(machine: Machine) -> Iterator[Figure]:
    """Predicted over measured peak of a training step with AdamW."""
    usual = Sizes(layers=12, width=1024, heads=16, length=1024, samples=4, microbatches=4, vocabulary=8192)
    few = replace(usual, layers=2, width=2048, length=256, samples=1, vocabulary=50304)  # most bytes are the model's
    small = Sizes(layers=1, width=64, heads=1, length=64, samples=1, microbatches=1, vocabulary=64)
    for dtype in (torch.bfloat16, torch.float32):  # allocates the workspaces of cuBLAS, which stay
        plain_loop(small.model(machine.device, dtype), *small.batch(machine.device), 1)()
    for name, precision, recompute, given in (
        ("1f1b", Precision("bf16"), "none", usual),
        ("gpipe", Precision("bf16"), "full", usual),
        ("gpipe", Precision(), "none", usual),
        ("1f1b", Precision("bf16"), "none", few),
        ("gpipe", Precision(), "full", replace(usual, vocabulary=1024)),
        ("v-half", Precision("bf16"), "full", replace(usual, layers=4)),  # two stages; I and W apart
    ):
        sizes = given.on(machine)
        machine.free()
        cuda = machine.device.type == "cuda"
        before = torch.cuda.memory_allocated(machine.device) if cuda else 0
        schedule = pl.schedules.build(name, num_ranks=1, num_microbatches=sizes.microbatches)
        model, batch = sizes.model(machine.device, torch.float32), sizes.batch(machine.device)
        with pl.Pipeline(
            model, schedule, loss_fn=loss_fn, precision=precision, recompute=recompute, transport="loopback"
        ) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), fused=cuda)

            def step(pipe: Any = pipe, batch: Any = batch, optimizer: Any = optimizer) -> None:
                pipe.step(*batch)
                pl.update_parameters(optimizer)
                optimizer.zero_grad()

            step()
            machine.free()
            machine.forget_peak()
            step()
            machine.synchronize()
            measured = machine.peak_bytes() - before
            layers = gpt_layers(sizes.config, sizes.samples, 2 if precision.has_masters else 4)
            kinds = pl.ir.recompute.Recompute(recompute)
            stages = in_stages(layers, even_parts(sizes.layers, schedule.num_stages))
            known = MemoryModel(stages=stages, precision=precision, recompute=[kinds] * len(stages))
            (forecast,) = memory_of_ranks(lower(merge_backwards(schedule), data=pipe.program.data), known)
        what = f"{sizes}, {name}, {precision.dtype}, recompute {recompute}"
        yield Figure("memory", f"{what}: predicted over {measured / 2**20:,.0f} MiB", single(forecast.peak / measured))
        del model, pipe, optimizer, step
