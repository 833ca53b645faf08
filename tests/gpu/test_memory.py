"""Bytes on a CUDA device: what forwards keep, model states, and what offload saves."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch

import pipeloom as pl
from pipeloom.autograd.recomputation import recomputed
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.errors import InputError
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel import Precision
from pipeloom.passes import lower
from pipeloom.plan.memory import MemoryModel, gpt_layers, in_stages
from pipeloom.plan.memory.rank_memory import update_memory
from pipeloom.split import split
from tests.gpu.gpt import CUDA, larger, larger_batch

HOST = "cpu"  # offload target: pinned memory
SIZES = {"vocabulary_size": 512, "width": 256, "heads": 4, "sequence_length": 512, "tie_embeddings": False}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", Recompute)
def test_forwards_keep_what_the_closed_form_says(dtype: str, recompute: Recompute) -> None:
    config = GPTConfig(**SIZES, layers=3)
    model = GPT(config)
    init_parameters(model, seed=0)
    model = model.to(CUDA, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    predicted = in_stages(gpt_layers(config, 2, 2 if dtype == "bf16" else 4), [1, 1, 1])
    value, targets = torch.randint(0, 512, (2, 2, 512), device=CUDA)
    for number, (stage, layers) in enumerate(zip(split(model, 3).modules, predicted, strict=True)):
        kept = SavedBytes.beyond(stage)
        with kept.counting():
            output = recomputed(stage, recompute)(value)
            if number == 2:
                output = loss_fn(output.float(), targets)
        expected = sum(layer.kept_bytes[recompute] for layer in layers)
        print(f"{dtype} {recompute} stage {number}: {kept.now} bytes kept, {expected:.0f} predicted")
        assert kept.now == pytest.approx(expected, rel=0.02)
        value = output.detach().requires_grad_()


def _states(precision: Precision) -> tuple[int, dict[str, float]]:
    """Bytes of parameters, gradients and optimizer states behind two steps, and what is predicted by kind."""
    config = GPTConfig(**SIZES, layers=4)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
    gc.collect()
    before = torch.cuda.memory_allocated()
    model = GPT(config)
    init_parameters(model, seed=0)
    inputs, targets = torch.randint(0, 512, (2, 4, 512), device=CUDA)
    with pl.Pipeline(model.to(CUDA), schedule, loss_fn=loss_fn, precision=precision) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.step(inputs, targets)
            pl.update_parameters(optimizer)
        gc.collect()
        found = torch.cuda.memory_allocated() - before - inputs.nbytes - targets.nbytes
        model_memory = MemoryModel(
            stages=[gpt_layers(config, 2, 2 if precision.has_masters else 4)], precision=precision
        )
        kinds, _ = update_memory(lower(schedule, data=pipe.program.data), model_memory, 0)
    return found, kinds


@pytest.mark.parametrize("precision", [Precision(), Precision("bf16"), Precision("bf16", gradients="same")])
def test_states_take_what_is_predicted(precision: Precision) -> None:
    _states(precision)  # allocates the workspaces of cuBLAS, which stay
    found, kinds = _states(precision)
    print(f"{precision}: {found} bytes, {sum(kinds.values()):.0f} predicted: {kinds}")
    assert found == pytest.approx(sum(kinds.values()), rel=0.02)


class Sizes(NamedTuple):
    """Of a run: activations are most of its memory, or model states."""

    width: int
    microbatches: int
    samples: int


def _trained(
    sizes: Sizes, *, moves_states: bool, **options: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], int, int]:
    """Losses and parameters of three steps, the peak of the last forwards and backwards, and bytes before them."""
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=sizes.microbatches)
    inputs, targets = larger_batch(sizes.samples)
    gc.collect()
    with pl.Pipeline(larger(8, sizes.width), schedule, loss_fn=loss_fn, **options) as pipe:
        optimizer: Any = torch.optim.AdamW(pipe.parameters(), fused=True)
        if moves_states:
            optimizer = pl.OffloadedOptimizer(optimizer, HOST, portion_bytes=4 << 20)
        losses = []
        for _ in range(3):
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            losses.append(pipe.step(inputs, targets))
            peak = torch.cuda.max_memory_allocated()
            pl.update_parameters(optimizer)
            optimizer.zero_grad()
        values = {name: value.cpu() for name, value in pipe.state_dict().items()}
        if moves_states:
            optimizer.close()
    return losses, values, peak, held


@pytest.mark.usefixtures("same_bits")
@pytest.mark.parametrize("kind", ["activations", "optimizer"])
def test_offload_to_pinned_memory_changes_no_number_and_saves_memory(kind: str) -> None:
    sizes = Sizes(256, 8, 16) if kind == "activations" else Sizes(512, 2, 2)
    options: dict[str, Any] = {}
    if kind == "activations":
        options["offload"] = pl.OffloadActivations(HOST, beside=0)
    losses, values, peak, held = _trained(sizes, moves_states=kind != "activations", **options)
    expected_losses, expected, expected_peak, expected_held = _trained(sizes, moves_states=False)
    print(f"{kind}: peak {peak} bytes, {expected_peak} without; between steps {held}, {expected_held} without")
    assert all(torch.equal(a, b) for a, b in zip(losses, expected_losses, strict=True)), (losses, expected_losses)
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    assert peak < 0.9 * expected_peak
    if kind != "activations":
        assert held < 0.75 * expected_held


def test_offload_of_main_parameters_is_refused() -> None:
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=2)
    data = pl.DataParallel("ddp", offload=HOST)
    with pytest.raises(InputError, match="cannot be offloaded"):
        pl.Pipeline(larger(2, 64), schedule, loss_fn=loss_fn, precision="bf16", data=data)
