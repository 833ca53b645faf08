"""Schedules with I and W, made by hand, against plain accumulation: one process, threads, and real processes."""

from __future__ import annotations

import copy
import itertools
import random
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import pipeloom as pl
from pipeloom.autograd.split_backward import backward_input
from pipeloom.ir import Action, Op, Placement, Schedule
from tests.cpu.pairwise import fewer, of_grid, pairwise
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import Checkpointed, accumulate, language_loss, make_gpt, make_mlp, tokens
from tests.pure.handmade import random_schedule

mse = nn.functional.mse_loss
F, B, I, W = Op.F, Op.B, Op.I, Op.W  # noqa: E741


def _schedule(name: str, placement: Placement, num_microbatches: int, orders: list[list[Action]]) -> Schedule:
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        placement=placement,
        orders=tuple(tuple(order) for order in orders),
    )


def zb_h1(num_ranks: int, num_microbatches: int, deeper: int = 1) -> Schedule:
    """Zero Bubble's H1: W of micro-batch b - d follows I of b; with `deeper` 2, H2."""
    p, m = num_ranks, num_microbatches
    orders: list[list[Action]] = []
    for d in range(p):
        warm_up, lag = deeper * (p - 1 - d), deeper * d
        order = [Action(d, F, b) for b in range(min(warm_up, m))]
        for b in range(m):
            order += [Action(d, F, warm_up + b)] if warm_up + b < m else []
            order.append(Action(d, I, b))
            order += [Action(d, W, b - lag)] if b >= lag else []
        order += [Action(d, W, b) for b in range(max(0, m - lag), m)]
        orders.append(order)
    return _schedule(f"zb-h{deeper}", Placement.loop(p), m, orders)


def late_w(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe with every W at the very end."""
    orders = [[Action(d, op, b) for op in (F, I, W) for b in range(num_microbatches)] for d in range(num_ranks)]
    return _schedule("late-w", Placement.loop(num_ranks), num_microbatches, orders)


def v_shape(num_ranks: int, num_microbatches: int) -> Schedule:
    """A V, micro-batch by micro-batch, W of the one before after the backward of the next."""
    placement = Placement.v(num_ranks)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    stages = range(2 * num_ranks)
    for b in range(num_microbatches):
        for stage in stages:
            orders[placement.rank_of(stage, b)].append(Action(stage, F, b))
        for stage in reversed(stages):
            orders[placement.rank_of(stage, b)].append(Action(stage, I, b))
        for stage in stages:
            if b:
                orders[placement.rank_of(stage, b)].append(Action(stage, W, b - 1))
    for stage in stages:
        orders[placement.rank_of(stage, 0)].append(Action(stage, W, num_microbatches - 1))
    return _schedule("v", placement, num_microbatches, orders)


MAKERS = {"zb-h1": zb_h1, "zb-h2": lambda p, m: zb_h1(p, m, 2), "late-w": late_w, "v": v_shape}


def _check_gpt(pipe: pl.Pipeline, schedule: Schedule, num_microbatches: int, *, tied: bool) -> None:
    """Two steps with an evaluation before and between, then gradients and what was held."""
    reference = make_gpt(tied=tied)
    for step in range(2):
        inputs, targets = tokens(7, seed=step)
        pipe.evaluate(inputs, targets)
        expected = accumulate(reference, language_loss, inputs, targets, num_microbatches)
        assert torch.equal(pipe.step(inputs, targets), expected)
        predicted = pl.check(schedule).live_activations
        assert all(peak == predicted[rank] for rank, peak in pipe.memory.peak_live_activations.items())
        assert set(pipe.memory.live_activations.values()) == {0}
    references = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in pipe.named_parameters():
        name = name.replace(".inner", "")
        if tied:
            torch.testing.assert_close(parameter.grad, references[name], rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(parameter.grad, references[name]), name


@pytest.mark.parametrize(("name", "tied", "transport"), of_grid(MAKERS, (False, True), ("loopback", "threads")))
def test_gpt(name: str, tied: bool, transport: str) -> None:
    for num_ranks, num_microbatches in ((1, 2), (2, 1), (2, 5), (3, 7)):
        schedule = MAKERS[name](num_ranks, num_microbatches)
        pl.check(schedule)
        model = make_gpt(tied=tied)
        with pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport) as pipe:
            _check_gpt(pipe, schedule, num_microbatches, tied=tied)


@pytest.mark.parametrize("name", MAKERS)
def test_checkpointed_blocks_recompute_once(name: str) -> None:
    num_microbatches = 3
    schedule = MAKERS[name](2, num_microbatches)
    model = make_gpt()
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)
    blocks = list(model.blocks)
    with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe:
        _check_gpt(pipe, schedule, num_microbatches, tied=False)
    # in each of two steps: evaluation without recomputation, forward, recomputation
    assert [block.calls for block in blocks] == [2 * 3 * num_microbatches] * len(blocks)


def test_compiled_blocks() -> None:
    model = make_gpt()
    reference = make_gpt()
    for k, block in enumerate(model.blocks):
        model.blocks[k] = torch.compile(block, backend="aot_eager")
    inputs, targets = tokens(6)
    expected = accumulate(reference, language_loss, inputs, targets, 3)
    with pl.Pipeline(model, zb_h1(2, 3), loss_fn=language_loss) as pipe:
        torch.testing.assert_close(pipe.step(inputs, targets), expected)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


def test_schedules_made_by_chance() -> None:
    """Any legal order, B beside I and W, chunks, V, both directions, replicas."""
    inputs, targets = (torch.randn(5, 8, dtype=torch.float64) for _ in range(2))
    placements = [
        Placement.loop(1, 3),
        Placement.loop(3),
        Placement.loop(2, 2),
        Placement.v(2),
        Placement.bidirectional(2),
        Placement.replicated([1, 2, 2]),
    ]
    for seed, placement in itertools.product(range(4), placements):
        schedule = random_schedule(placement, 4, 1, True, random.Random(seed))
        predicted = pl.check(schedule).live_activations
        reference, model = make_mlp(dtype=torch.float64), make_mlp(dtype=torch.float64)
        expected = accumulate(reference, mse, inputs, targets, 4)
        with pl.Pipeline(model, schedule, loss_fn=mse) as pipe:
            torch.testing.assert_close(pipe.step(inputs, targets), expected, rtol=1e-12, atol=0)
            assert tuple(pipe.memory.peak_live_activations.values()) == predicted
            references = dict(reference.named_parameters())
            for name, parameter in pipe.named_parameters():
                torch.testing.assert_close(parameter.grad, references[name].grad, rtol=1e-12, atol=1e-15)


def test_what_stands_together_runs_as_b_where_nobody_waits() -> None:
    schedule = zb_h1(2, 3)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=mse) as pipe:
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))
        ran = {rank: Counter(action.op for action, _, _ in rows) for rank, rows in pipe.records}
    assert ran[0][B] == 3
    assert ran[0][I] == ran[0][W] == 0
    assert ran[1][B] == 0
    assert ran[1][I] == ran[1][W] == 3


def test_steps_add_up() -> None:
    """Several steps before one optimizer step."""
    reference, model = make_mlp(), make_mlp()
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    with pl.Pipeline(model, zb_h1(3, 3), loss_fn=mse) as pipe:
        for _ in range(4):
            accumulate(reference, mse, inputs, targets, 3)
            pipe.step(inputs, targets)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad)


def test_frozen_stages() -> None:
    inputs, targets = torch.randn(6, 8), torch.randn(6, 8)
    for frozen in ((0, 1), (2, 3), (4, 5), range(6)):
        reference, model = make_mlp(), make_mlp()
        for net in (reference, model):
            for layer in frozen:
                net[layer].requires_grad_(False)
        if len(frozen) < 6:
            accumulate(reference, mse, inputs, targets, 3)
        with pl.Pipeline(model, zb_h1(3, 3), loss_fn=mse) as pipe:
            pipe.step(inputs, targets)
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            assert parameter.grad is None or torch.equal(parameter.grad, other.grad)


def test_a_failure_names_the_action() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no gradient today")

    class Stage(nn.Linear):
        def forward(self, x):
            return Fails.apply(super().forward(x))

    model = nn.Sequential(nn.Linear(8, 8), Stage(8, 8))
    pipe = pl.Pipeline(model, zb_h1(2, 2), loss_fn=mse)
    with pytest.raises(pl.errors.StageError, match=r"rank 1, stage 1, action 1I0.*no gradient today"):
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))


def _with_ddp(rank: int) -> None:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8))
    reference = copy.deepcopy(module)
    everything = torch.randn(2, 3, 4, 8)
    for x in everything.flatten(0, 1):
        (reference(x).square().sum() / 2).backward()
    wrapped = nn.parallel.DistributedDataParallel(module)
    for k, x in enumerate(everything[rank]):
        leaf = x.clone().requires_grad_()
        with nullcontext() if k == 2 else wrapped.no_sync():
            graph = [get_gradient_edge(wrapped(leaf).square().sum())]
            _, rest = backward_input(graph, [torch.ones(())], [leaf])
            rest.accumulate()
    for parameter, other in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_data_parallel_hooks_reduce_in_w() -> None:
    run_ranks(_with_ddp, 2)


def _in_processes(rank: int, num_ranks: int, cases: list[tuple[str, int, bool, str]]) -> None:
    for name, num_microbatches, tied, transport in cases:
        schedule = MAKERS[name](num_ranks, num_microbatches)
        model = make_gpt(tied=tied)
        with pl.Pipeline(model, schedule, loss_fn=language_loss, transport=transport) as pipe:
            _check_gpt(pipe, schedule, num_microbatches, tied=tied)


IN_PROCESSES = list(itertools.product(MAKERS, (1, 4), (False, True), ("shared-memory", "torch")))


@pytest.mark.parametrize("cases", fewer(pairwise(IN_PROCESSES), IN_PROCESSES), ids=["pairs", "all"])
def test_in_processes(cases: list[tuple[str, int, bool, str]]) -> None:
    run_ranks(_in_processes, 2, 2, cases)
