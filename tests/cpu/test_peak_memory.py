"""The predicted peak of a step against the bytes that torch allocates in it, one allocation after another."""

from __future__ import annotations

import gc
import mmap
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import pipeloom as pl
from pipeloom.autograd import split_backward
from pipeloom.ir import DataAxis, DataStrategy
from pipeloom.ir.recompute import Recompute
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.tensor import cross_entropy
from pipeloom.passes import lower, merge_backwards
from pipeloom.plan.memory import (
    MemoryModel,
    backward_bytes,
    gpt_layers,
    in_stages,
    memory_of_ranks,
    stage_moments,
)
from pipeloom.plan.memory.rank_memory import update_memory
from pipeloom.split.chain_partition import partition
from pipeloom.transport import shared_block
from tests.cpu.ranks import run_ranks


def peak_of(step: Any) -> int:
    """Bytes allocated in a step at most, beside those that are there before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    found: list[tuple[int, int]] = []
    events = list(profiled.profiler.kineto_results.experimental_event_tree())
    for event in events:  # grows while it is walked along
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append((event.start_time_ns, fields.alloc_size))
        events += event.children
    now = peak = 0
    for _, size in sorted(found):
        now += size
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize(
    ("name", "microbatches", "recompute", "sizes"),
    [
        ("gpipe", 1, "none", {}),  # the first backward alone
        ("1f1b", 2, "none", {"vocabulary_size": 2048}),  # start of the second backward: gradients of logits
        ("1f1b", 2, "none", {"sequence_length": 16}),  # large parameters: end of the second backward
        ("gpipe", 1, "none", {"sequence_length": 16, "width": 256}),  # first gradients
        ("gpipe", 3, "full", {}),  # a block's recomputation
        ("gpipe", 2, "selective", {"kv_heads": 2}),
        ("1f1b", 2, "full", {"positions": "learned"}),
        ("1f1b", 2, "none", {"vocabulary_size": 4096, "sequence_length": 16, "tie_embeddings": True}),
        ("1f1b", 2, "full", {"dropout": 0.1, "sequence_length": 256, "width": 64}),
        ("gpipe", 2, "full", {"experts": 4}),
        ("1f1b", 3, "none", {"experts": 4, "sequence_length": 16}),  # products add to gradients of experts
        ("bfs", 2, "none", {}),
        ("zb-v", 3, "full", {}),  # in one process an I and its W are one backward
    ],
)
def test_a_step_peaks_where_the_forecast_says(
    name: str, microbatches: int, recompute: str, sizes: dict[str, Any]
) -> None:
    usual = {"vocabulary_size": 64, "layers": 2, "width": 128, "heads": 4, "sequence_length": 64}
    config = GPTConfig(**{**usual, "tie_embeddings": False, **sizes})
    model = GPT(config)
    init_parameters(model, seed=0)
    schedule = pl.schedules.build(name, num_ranks=1, num_microbatches=microbatches)
    inputs, targets = torch.randint(0, config.vocabulary_size, (2, 2 * microbatches, config.sequence_length))
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, recompute=recompute, transport="loopback") as pipe:
        for _ in range(3):  # the first steps look at more
            pipe.step(inputs, targets)
        model.zero_grad()
        gc.collect()
        measured = peak_of(lambda: pipe.step(inputs, targets))
    stages = in_stages(gpt_layers(config, 2, 4), partition([1] * config.layers, schedule.num_stages))
    kinds = [Recompute(recompute)] * schedule.num_stages
    known = MemoryModel(stages=stages, recompute=kinds, device="cpu")
    program = lower(merge_backwards(schedule))
    (held,) = memory_of_ranks(program, known)
    always, _ = update_memory(program, known, 0)
    states = sum(always.values()) - always["gradients"]
    print(f"{held.peak:.0f} bytes predicted, {measured + states:.0f} measured")
    assert held.peak == pytest.approx(measured + states, rel=0.01)


def test_a_loss_is_looked_at_without_memory_that_no_forecast_knows() -> None:
    """Gradients of halves of its samples are compared once, or where they are small."""
    config = GPTConfig(vocabulary_size=4096, layers=1, width=64, heads=2, sequence_length=64)
    schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=2)
    inputs, targets = torch.randint(0, config.vocabulary_size, (2, 8, config.sequence_length))
    with pl.Pipeline(GPT(config), schedule, loss_fn=loss_fn) as pipe:
        peaks = []
        for _ in range(5):
            gc.collect()
            peaks.append(peak_of(lambda: pipe.step(inputs, targets)))
    assert max(peaks[1:]) < 1.01 * peaks[-1]


TIED = GPTConfig(vocabulary_size=2048, layers=2, width=128, heads=4, sequence_length=32, tie_embeddings=True)


def _sharded_step(rank: int) -> tuple[int, int]:
    model = GPT(TIED)
    init_parameters(model, seed=0)
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)
    inputs, targets = torch.randint(0, TIED.vocabulary_size, (2, 2, TIED.sequence_length))
    mesh = pl.Mesh(dp=3)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, data="zero1") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        for _ in range(3):
            pipe.step(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        return peak_of(lambda: pipe.step(inputs, targets)), mesh.message_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
def test_reductions_inside_the_last_backward_count() -> None:
    """The blocks are being summed over replicas while the table's gradients come together."""
    measured, messages = map(max, zip(*run_ranks(_sharded_step, 3), strict=True))
    known = MemoryModel(stages=[gpt_layers(TIED, 1, 4)], recompute=[Recompute.NONE], device="cpu")
    schedule = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)
    program = lower(merge_backwards(schedule), data=DataAxis(degree=3, strategy=DataStrategy.ZERO1))
    held = memory_of_ranks(program, known)[0]
    always, _ = update_memory(program, known, 0)
    states = sum(always.values()) - always["gradients"] - always["messages"]
    print(f"{held.peak:.0f} bytes predicted, {measured + states:.0f} measured, {messages} of them in messages")
    assert held.peak - always["messages"] == pytest.approx(measured + states, rel=0.02)
    # Of blocks and tables, to two replicas, in whole pages; one may be used for both. Small messages have their own.
    assert 0.5 * always["messages"] < messages < always["messages"] + 8 * mmap.PAGESIZE


def _step_of_two(rank: int, name: str, microbatches: int, replicas: int, config: GPTConfig) -> tuple[int, int]:
    """The rank of the pipeline, and its peak."""
    model = GPT(config)
    init_parameters(model, seed=0)
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=microbatches)
    inputs, targets = torch.randint(0, config.vocabulary_size, (2, microbatches, config.sequence_length))
    mesh = pl.Mesh(pp=2, dp=replicas)
    with (
        pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=mesh, data="ddp") as pipe,
        patch.object(shared_block, "_COPIED_BYTES", sys.maxsize),  # messages in memory of torch
    ):
        for _ in range(3):
            pipe.step(inputs, targets)
            for parameter in pipe.parameters():
                parameter.grad = None
        gc.collect()
        return mesh.coordinate("pp"), peak_of(lambda: pipe.step(inputs, targets))


@pytest.mark.skipif(torch.cuda.is_available(), reason="forks")
@pytest.mark.parametrize(
    ("name", "microbatches", "replicas", "sizes"),
    [
        ("chimera", 2, 1, {"width": 256, "sequence_length": 8}),  # a part of the other rank's gradients, and of sums
        ("chimera", 1, 1, {"width": 256, "sequence_length": 8}),  # gradients of the stage that the rank does not run
        ("chimera", 1, 2, {"width": 256, "sequence_length": 8}),  # the gradients of a unit in one piece until the last
        ("zb-v", 2, 1, {"vocabulary_size": 2048, "width": 64}),  # the table's, from the last stage's first backward on
    ],
)
def test_ranks_with_the_same_stages_or_both_ends_peak_where_the_forecast_says(
    name: str, microbatches: int, replicas: int, sizes: dict[str, Any]
) -> None:
    config = GPTConfig(**{"vocabulary_size": 64, "layers": 4, "heads": 4, "sequence_length": 128, **sizes})
    measured = dict(run_ranks(_step_of_two, 2 * replicas, name, microbatches, replicas, config))
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=microbatches)
    stages = in_stages(gpt_layers(config, 1, 4), [4 // schedule.num_stages] * schedule.num_stages)
    known = MemoryModel(stages=stages, device="cpu")
    data = DataAxis(degree=2, strategy=DataStrategy.DDP) if replicas > 1 else None
    program = lower(merge_backwards(schedule), data=data, tied_stages=((0, schedule.num_stages - 1),))
    for rank, held in enumerate(memory_of_ranks(program, known)[:2]):
        always, _ = update_memory(program, known, rank)
        states = sum(always.values()) - always["gradients"]
        print(f"{held.peak:.0f} bytes predicted, {measured[rank] + states:.0f} measured")
        assert held.peak == pytest.approx(measured[rank] + states, rel=0.01)


def test_forecasts_know_in_what_groups_gradients_and_exponentials_are_computed() -> None:
    assert split_backward._GROUP_ELEMENTS == stage_moments._GROUP_ELEMENTS
    assert cross_entropy._CHUNK_ELEMENTS == backward_bytes.CHUNK_ELEMENTS
