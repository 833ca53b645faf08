"""Calls and bytes of layers of experts: what axes count equals the formulae, for every degree, exchange and router."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts import Experts
from pipeloom.parallel.context import ContextParallel
from pipeloom.parallel.expert.traffic import Rows, rows_of
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.traffic import Traffic, together
from pipeloom.plan.architecture import Architecture
from tests.cpu.pairwise import in_turn

from .test_stage_traffic import counted, less

LENGTH, SAMPLES = 8, 4
CONFIG = GPTConfig(
    vocabulary_size=31,
    layers=2,
    width=16,
    heads=4,
    sequence_length=LENGTH,
    tie_embeddings=False,
    experts=4,
    experts_every=2,
)
CASES: dict[str, tuple[InsideStage, dict[str, Any]]] = {
    "ep": (InsideStage(expert=2), {}),
    "ep of 4": (InsideStage(expert=4), {"router": "switch", "capacity_factor": 0.75}),
    "tp": (InsideStage(tensor=2), {"shared_experts": 1}),
    "ep, tp": (InsideStage(expert=2, tensor=2), {"router": "glam", "capacity_factor": 1.0}),
    "ep, tp, sequence": (InsideStage(expert=2, tensor=2, sequence=True), {"shared_experts": 1}),
    "ep in cp": (InsideStage(expert=2, expert_axes=("cp",), context=2), {"router": "sigmoid", "top_k": 3}),
    "capacity": (InsideStage(expert=2, exchange="capacity"), {"router": "gshard"}),
    "capacity, by sequence": (
        InsideStage(expert=2, tensor=2, exchange="capacity"),
        {"capacity_factor": 0.6, "capacity_by": "sequence"},
    ),
    "expert-choice": (InsideStage(expert=4, exchange="capacity"), {"router": "expert-choice"}),
}


def mesh_of(inside: InsideStage) -> tuple[int, dict[str, Any]]:
    """How many processes, and the arguments of `Mesh`."""
    data = inside.expert if "dp" in inside.expert_axes else 1
    degrees = {"dp": data, "cp": inside.context, "tp": inside.tensor, "ep": inside.expert}
    return data * inside.processes, {**degrees, "expert_axes": inside.expert_axes}


def make(settings: dict[str, Any], mesh: pl.Mesh, inside: InsideStage, dtype: torch.dtype) -> tuple[GPT, list]:
    """A cut model, and the list to which its layer adds the assignments of each forward."""
    model = GPT(replace(CONFIG, **settings))
    init_parameters(model, seed=0)
    pl.parallelize(model.to(dtype), mesh, sequence=inside.sequence, exchange=inside.exchange)
    counts: list[list[int]] = []
    for module in model.modules():
        if isinstance(module, Experts):
            module.router.register_forward_hook(lambda _module, _args, routing: counts.append(routing.counts.tolist()))
    return model.eval(), counts  # draws nothing


def batch(place: int, samples: int) -> torch.Tensor:
    return torch.randint(0, 31, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(place))


def predicted(settings: dict[str, Any], inside: InsideStage, rows: Rows, recompute: Recompute, element: int) -> Traffic:
    sizes = Architecture.of_gpt(replace(CONFIG, **settings)).layer_sizes(SAMPLES, element)
    stage = inside.traffic(sizes)
    blocks = [stage.block(recompute), stage.block(recompute, experts=True, rows=rows)]
    return together([stage.embedding(), *blocks, stage.norm(), stage.head()])


def rows_at(counts: list[list[list[int]]], coordinate: int, call: int) -> Rows:
    """The rows of a process from what the members of its ep axis chose in one call."""
    return rows_of([each[call] for each in counts], coordinate)


@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [torch.float64, torch.bfloat16]), ids=str)
def test_what_axes_count_equals_the_formulae(name: str, dtype: torch.dtype) -> None:
    inside, settings = CASES[name]
    processes, degrees = mesh_of(inside)

    def work() -> tuple[Any, ...]:
        with pl.Mesh(**degrees) as mesh:
            model, counts = make(settings, mesh, inside, dtype)
            context = ContextParallel(mesh.axis("cp"), "ring") if inside.context > 1 else None
            tokens = batch(mesh.coordinate("dp"), SAMPLES)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            with nullcontext() if context is None else context.tokens({"length": LENGTH}).current():
                if context is not None:
                    inputs, targets = context.cut(inputs), context.cut(targets)
                before = counted(mesh)
                loss = loss_fn(model(inputs), targets)
            forward = counted(mesh)
            loss.backward()
            sent = Traffic(less(forward, before), less(counted(mesh), forward))
            return mesh.coordinate("ep"), mesh.shape.along("ep", mesh.rank), counts, sent

    found = pl.run_threads(processes, work, timeout_seconds=60.0)
    for coordinate, members, _, sent in found:
        rows = rows_at([found[member][2] for member in members], coordinate, 0)
        assert sent == predicted(settings, inside, rows, Recompute.NONE, dtype.itemsize)


@pytest.mark.parametrize(("name", "recompute"), in_turn(["ep", "ep, tp", "ep, tp, sequence"], Recompute), ids=str)
def test_a_step_sends_what_the_formulae_say_per_micro_batch(name: str, recompute: Recompute) -> None:
    inside, settings = CASES[name]
    processes, degrees = mesh_of(inside)

    def work() -> tuple[Any, ...]:
        with pl.Mesh(**degrees) as mesh:
            sent, seen = [], []
            for microbatches in (1, 2):  # sums of gradients come once per step
                model, counts = make(settings, mesh, inside, torch.float32)
                schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=microbatches)
                tokens = batch(mesh.coordinate("dp"), SAMPLES * microbatches)
                options: dict[str, Any] = {"mesh": mesh, "recompute": recompute}
                with pl.Pipeline(model, schedule, loss_fn=loss_fn, **options) as pipe:
                    before = counted(mesh)
                    pipe.step(tokens[:, :-1], tokens[:, 1:])
                    sent.append(less(counted(mesh), before))
                seen = counts
            return mesh.coordinate("ep"), mesh.shape.along("ep", mesh.rank), seen, less(sent[1], sent[0])

    found = pl.run_threads(processes, work, timeout_seconds=60.0)
    for coordinate, members, _, sent in found:
        rows = rows_at([found[member][2] for member in members], coordinate, 1)
        wanted = predicted(settings, inside, rows, recompute, 4)
        assert sent == together([Traffic(wanted.forward, {}), Traffic(wanted.backward, {})]).forward
