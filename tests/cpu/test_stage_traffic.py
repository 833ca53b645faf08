"""Calls and bytes of processes that share a stage: what their axes count equals the formulae, for every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.traffic import LayerSizes, Sent, Traffic, together
from tests.cpu.pairwise import pairwise

LAYERS, LENGTH, VOCABULARY = 2, 24, 31
CASES = {
    "1d": InsideStage(tensor=2),
    "1d of 4": InsideStage(tensor=4),
    "1d, sequence": InsideStage(tensor=2, sequence=True),
    "1d of 4, sequence": InsideStage(tensor=4, sequence=True),
    "2d": InsideStage(tensor=4, layout="2d"),
    "2.5d": InsideStage(tensor=8, layout="2.5d", depth=2),
    "3d": InsideStage(tensor=8, layout="3d"),
    "ring": InsideStage(context=2),
    "ring of 3": InsideStage(context=3),
    "ring, plain order": InsideStage(context=2, context_kind="ring-plain"),
    "ring self-attention": InsideStage(context=3, context_kind="ring-self-attention"),
    "ulysses": InsideStage(context=2, context_kind="ulysses"),
    "ulysses of 4": InsideStage(context=4, context_kind="ulysses"),
    "1d and ring": InsideStage(tensor=2, context=2),
    "1d, sequence and ulysses": InsideStage(tensor=2, sequence=True, context=2, context_kind="ulysses"),
    "2d and ring": InsideStage(tensor=4, layout="2d", context=2),
}
# With two key heads; fewer than processes are below.
GROUPED = [name for name in CASES if name not in ("1d of 4", "1d of 4, sequence")]
DTYPES = (torch.float64, torch.bfloat16)


def build(key_heads: int | None) -> tuple[GPTConfig, GPT]:
    config = GPTConfig(
        vocabulary_size=VOCABULARY,
        layers=LAYERS,
        width=48,
        heads=4,
        kv_heads=key_heads,
        sequence_length=LENGTH,
        tie_embeddings=False,
    )
    model = GPT(config)
    init_parameters(model, seed=0)
    return config, model


def sizes_of(config: GPTConfig, samples: int, element: int) -> LayerSizes:
    return LayerSizes(
        samples=samples,
        sequence_length=LENGTH,
        width=config.width,
        heads=config.heads,
        key_heads=config.key_heads,
        head_width=config.head_width,
        mlp_width=config.mlp_ratio * config.width,
        vocabulary_size=VOCABULARY,
        element=element,
    )


def counted(mesh: pl.Mesh) -> dict[tuple[str, str], Sent]:
    return {key: Sent(found.calls, found.num_bytes) for key, found in mesh.meter.traffic.items()}


def less(after: dict[tuple[str, str], Sent], before: dict[tuple[str, str], Sent]) -> dict[tuple[str, str], Sent]:
    zero = Sent(0, 0)
    found = {
        key: Sent(sent.calls - before.get(key, zero).calls, sent.num_bytes - before.get(key, zero).num_bytes)
        for key, sent in after.items()
    }
    return {key: sent for key, sent in found.items() if sent.calls}


def shared(model: GPT, mesh: pl.Mesh, inside: InsideStage) -> Any:
    if inside.tensor == 1:
        return model
    return pl.parallelize(model, mesh, layout=inside.layout, depth=inside.depth, sequence=inside.sequence)


def predicted(config: GPTConfig, inside: InsideStage, place: Any, recompute: Recompute, element: int) -> Traffic:
    traffic = inside.traffic(sizes_of(config, 4, element), place)
    return together([traffic.embedding(), *[traffic.block(recompute)] * LAYERS, traffic.norm(), traffic.head()])


def on_mesh(inside: InsideStage, work: Callable[[pl.Mesh], Any]) -> None:
    def each() -> None:
        with pl.Mesh(tp=inside.tensor, cp=inside.context) as mesh:
            work(mesh)

    pl.run_threads(inside.processes, each, timeout_seconds=60.0)


def _counted_cases() -> list[Any]:
    """Every layout in both formats, and with both numbers of key heads where it can have them."""
    grid = [case for case in product(CASES, (False, True), DTYPES) if not case[1] or case[0] in GROUPED]
    chosen = pairwise(grid)
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.whole_grid) for case in grid]


@pytest.mark.parametrize(("name", "grouped", "dtype"), _counted_cases(), ids=str)
def test_what_axes_count_equals_the_formulae(name: str, grouped: bool, dtype: torch.dtype) -> None:
    inside = CASES[name]
    tokens = torch.arange(4 * (LENGTH + 1)).view(4, -1) % VOCABULARY

    def work(mesh: pl.Mesh) -> None:
        config, whole = build(2 if grouped else None)
        model = shared(whole.to(dtype), mesh, inside)
        context = ContextParallel(mesh.axis("cp"), inside.context_kind) if inside.context > 1 else None
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with nullcontext() if context is None else context.tokens({"length": LENGTH}).current():
            if context is not None:
                inputs, targets = context.cut(inputs), context.cut(targets)
            before = counted(mesh)
            loss = loss_fn(model(inputs), targets)
        forward = counted(mesh)
        loss.backward()
        wanted = predicted(config, inside, mesh.place, Recompute.NONE, dtype.itemsize)
        assert less(forward, before) == wanted.forward
        assert less(counted(mesh), forward) == wanted.backward

    on_mesh(inside, work)


def _stepped_cases() -> list[Any]:
    """Layouts on more ranks than they need run in whole grids alone: the test above counts what their axes send.

    So do most layouts without recomputation.
    """
    needed, schedules = [name for name in CASES if " of " not in name], ("gpipe", "zb-h1")
    again = Recompute.SELECTIVE, Recompute.FULL
    chosen = [(name, again[turn % 2], schedules[turn // 2 % 2]) for turn, name in enumerate(needed)]
    chosen += [("1d", Recompute.NONE, "gpipe"), ("2d", Recompute.NONE, "zb-h1"), ("ring", Recompute.NONE, "zb-h1")]
    grid = product(CASES, Recompute, schedules)
    return [pytest.param(*case, marks=() if case in chosen else pytest.mark.whole_grid) for case in grid]


@pytest.mark.parametrize(("name", "recompute", "schedule"), _stepped_cases(), ids=str)
def test_a_step_sends_what_the_formulae_say_per_micro_batch(name: str, recompute: Recompute, schedule: str) -> None:
    inside = CASES[name]

    def work(mesh: pl.Mesh) -> None:
        sent = []
        for microbatches in (1, 2):  # sums of gradients come once per step
            config, whole = build(1 if name in ("1d of 4", "ulysses of 4") else None)
            made = pl.schedules.build(schedule, num_ranks=1, num_microbatches=microbatches)
            inputs = torch.arange(4 * microbatches * (LENGTH + 1)).view(-1, LENGTH + 1) % VOCABULARY
            options: dict[str, Any] = {} if inside.context == 1 else {"context": inside.context_kind}
            model = shared(whole, mesh, inside)
            with pl.Pipeline(model, made, loss_fn=loss_fn, mesh=mesh, recompute=str(recompute), **options) as pipe:
                before = counted(mesh)
                pipe.step(inputs[:, :-1], inputs[:, 1:])
                sent.append(less(counted(mesh), before))
        wanted = predicted(config, inside, mesh.place, recompute, 4)
        assert less(sent[1], sent[0]) == together([Traffic(wanted.forward, {}), Traffic(wanted.backward, {})]).forward

    on_mesh(inside, work)


def test_traffic_of_one_process_is_nothing() -> None:
    config, _ = build(None)
    assert predicted(config, InsideStage(), None, Recompute.NONE, 4) == Traffic({}, {})
    assert math.prod(InsideStage().axes.values()) == 1
