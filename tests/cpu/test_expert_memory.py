"""Activations of layers of experts: predicted bytes against those that autograd keeps, for every router and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipeloom as pl
from pipeloom.autograd.recomputation import recomputed
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.plan.memory import gpt_layers
from tests.cpu.pairwise import in_turn

from .test_expert_traffic import mesh_of

SIZES: dict[str, Any] = {
    "vocabulary_size": 70,
    "layers": 2,
    "width": 48,
    "heads": 4,
    "sequence_length": 40,
    "tie_embeddings": False,
    "experts": 4,
    "experts_every": 2,
    "expert_width": 96,
}
ROUTERS: list[dict[str, Any]] = [
    {},
    {"router": "switch", "capacity_factor": 4.0},
    {"router": "gshard", "capacity_factor": 2.0},
    {"router": "glam", "capacity_factor": 2.0, "z_loss_weight": 0.1},
    {"router": "noisy-topk"},
    {"router": "sigmoid", "top_k": 3},
    {"router": "expert-choice"},
    {"shared_experts": 2, "z_loss_weight": 0.1},
]
INSIDE = {
    "ep": InsideStage(expert=2),
    "ep of 4": InsideStage(expert=4),
    "tp": InsideStage(tensor=2),
    "ep, tp": InsideStage(expert=2, tensor=2),
    "ep, tp, sequence": InsideStage(expert=2, tensor=2, sequence=True),
    "ep, capacity": InsideStage(expert=2, exchange="capacity"),
    "ep in cp": InsideStage(expert=2, expert_axes=("cp",), context=2),
}


def make(**settings: Any) -> tuple[GPTConfig, GPT]:
    config = GPTConfig(**SIZES, **settings)
    model = GPT(config)
    init_parameters(model, seed=0)
    for name, parameter in model.named_parameters():
        if "router" in name:  # equal logits would choose equal experts
            torch.nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(3))
    return config, model


@pytest.mark.filterwarnings("ignore:router 'expert-choice'")
@pytest.mark.parametrize(("settings", "dtype"), in_turn(ROUTERS, [torch.float32, torch.bfloat16]), ids=str)
def test_a_block_keeps_what_the_closed_form_says(settings: dict[str, Any], dtype: torch.dtype) -> None:
    config, model = make(**settings)
    block = model.to(dtype).blocks[1]
    layer = gpt_layers(config, 2, dtype.itemsize)[2]
    held = {name.removeprefix("blocks.1."): shape for name, shape in layer.parameters.items()}
    assert held == {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert layer.buffer_elements == sum(buffer.numel() for buffer in block.buffers())
    tokens = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_() * 1
    for recompute in (Recompute.NONE, Recompute.SELECTIVE):
        kept = SavedBytes.beyond(block)
        torch.manual_seed(1)
        with kept.counting(), pl.auxiliary_losses() as found:
            output = recomputed(block, recompute)(tokens)
        # GShard leaves out second choices at random.
        tolerance = 0.05 if config.router == "gshard" else 0.001
        assert kept.now == pytest.approx(layer.kept_bytes[recompute], rel=tolerance)
        del output, found


@pytest.mark.parametrize(("name", "recompute"), in_turn(INSIDE, Recompute), ids=str)
def test_processes_keep_what_the_closed_form_says(name: str, recompute: Recompute) -> None:
    """A step of one micro-batch, the mean over processes: their experts are not equally busy."""
    inside = INSIDE[name]
    processes, degrees = mesh_of(inside)
    settings: dict[str, Any] = {"shared_experts": 1} if name in ("tp", "ep, tp, sequence") else {}
    if name == "ep, capacity":
        settings["capacity_factor"] = 4.0
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)

    def work() -> tuple[int, float]:
        with pl.Mesh(**degrees) as mesh:
            config, model = make(**settings)
            pl.parallelize(model, mesh, sequence=inside.sequence, exchange=inside.exchange)
            tokens = torch.randint(0, 70, (4, 41), generator=torch.Generator().manual_seed(mesh.coordinate("dp")))
            context = "ring" if inside.context > 1 else None
            options: dict[str, Any] = {"mesh": mesh, "recompute": recompute, "context": context}
            with pl.Pipeline(model, schedule, loss_fn=loss_fn, **options) as pipe:
                pipe.step(tokens[:, :-1], tokens[:, 1:])  # rotary tables are made
                saved = SavedBytes([*pipe.parameters(), *(b for m in pipe.modules() for b in m.buffers())])
                with saved.counting():
                    pipe.step(tokens[:, :-1], tokens[:, 1:])
            layers = gpt_layers(config, 4, 4, inside)
            return saved.peak, sum(layer.kept_bytes[recompute] for layer in layers)

    found = pl.run_threads(processes, work, timeout_seconds=60.0)
    measured, wanted = sum(peak for peak, _ in found) / len(found), found[0][1]
    assert measured == pytest.approx(wanted, rel=0.02)
