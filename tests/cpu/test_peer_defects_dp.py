"""What torch.distributed.pipelining 2.13 gets wrong under data parallelism: PP2 x DP2 on four processes.

Every process returns what it holds of gradients, shards or whole; `_whole` puts them together and demands that every
element is held by somebody and that those who hold the same one agree. The two copies have different samples, so a
reduction that does nothing is off by about as much as the gradients themselves: `_far_from` makes sure of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.ir import DataStrategy
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import Checkpointed, accumulate, checkpoint_blocks, language_loss, make_gpt, tokens

P, D, M = 2, 2, 4
STRATEGIES = tuple(DataStrategy)
ZERO3_GRANULARITIES = ["chunk", "microbatch"]
SPLIT = ["zb-h1", "zb-v", "dualpipev"]
TOLERANCE = 1e-12  # float64, relative to the largest element of a gradient
# By name: elements start..stop of a shape, and their values; arrays, as a tensor does not outlive its process.
Held = dict[str, tuple[int, int, tuple[int, ...], np.ndarray]]
Configuration = tuple[str, str | pl.DataParallel]  # a schedule, and how replicas share


def _model(*, tied: bool = False, checkpointed: bool = False) -> nn.Module:
    model = make_gpt(tied=tied, dtype=torch.float64)
    if checkpointed:
        checkpoint_blocks(model)
    return model


def _batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """The global batch: first the samples of copy 0, then those of copy 1."""
    return tokens(D * 2 * M, seed=seed)


def _part(mesh: pl.Mesh, seed: int = 0) -> tuple[Tensor, ...]:
    """The samples of this process's copy."""
    return tuple(tensor.chunk(D)[mesh.coordinate("dp")] for tensor in _batch(seed))


def _pipeline(mesh: pl.Mesh, name: str, data: str | pl.DataParallel, model: nn.Module | None = None) -> pl.Pipeline:
    schedule = pl.schedules.build(name, num_ranks=P, num_microbatches=M)
    return pl.Pipeline(model or _model(), schedule, loss_fn=language_loss, mesh=mesh, data=data)


def _held(pipe: pl.Pipeline) -> Held:
    held = {}
    for name, parameter in pipe.named_parameters():
        whole = (0, parameter.numel(), tuple(parameter.shape))
        gradient = torch.zeros_like(parameter) if parameter.grad is None and not parameter.numel() else parameter.grad
        held[name] = (*pipe.state.ranges.get(name, whole), gradient.detach().flatten().clone().numpy())
    return held


def _whole(parts: Iterable[Held]) -> dict[str, Tensor]:
    """Gradients put together from what each process holds of them."""
    whole: dict[str, Tensor] = {}
    for part in parts:
        for name, (start, stop, shape, values) in part.items():
            place = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64)).view(-1)[start:stop]
            known, new = ~place.isnan(), torch.from_numpy(values)
            assert torch.equal(place[known], new[known]), f"processes disagree about {name}"
            place.copy_(new)
    return whole


@cache
def _reference(seeds: tuple[int, ...] = (0,), only_copy: int | None = None) -> tuple[float, dict[str, Tensor]]:
    """The last loss and the gradients of a single process on the global batches, or on those of one copy."""
    model = _model()
    loss = torch.nan
    for seed in seeds:
        batch = _batch(seed)
        if only_copy is not None:
            batch = tuple(tensor.chunk(D)[only_copy] for tensor in batch)
        loss = float(accumulate(model, language_loss, *batch, M))
    return loss, {name: parameter.grad for name, parameter in model.named_parameters()}


def _error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[n] - e).abs().max() / e.abs().max()) for n, e in expected.items())


def _assert_right(answers: list[Held], expected: dict[str, Tensor], what: object) -> None:
    error = _error(_whole(answers), expected)
    assert error <= TOLERANCE, f"{what}: gradients are off by {error:.1e}"


def test_the_reference_detects_a_reduction_that_does_nothing() -> None:
    _, expected = _reference()
    for copy in range(D):
        _, alone = _reference(only_copy=copy)
        assert _error(alone, expected) > 0.1
        assert _error({name: gradient / D for name, gradient in alone.items()}, expected) > 0.1


def _two_steps(rank: int) -> dict[str, list[Held]]:
    mesh = pl.Mesh(pp=P, dp=D)
    found = {}
    for strategy in STRATEGIES:
        with _pipeline(mesh, "1f1b", strategy) as pipe:
            found[strategy] = []
            for seed in (0, 0, 1):
                pipe.step(*_part(mesh, seed))
                found[strategy].append(_held(pipe))
    return found


def test_steps_before_one_update_add_up_exactly() -> None:
    answers = run_ranks(_two_steps, P * D)
    for strategy in STRATEGIES:
        once, twice, thrice = ([answer[strategy][step] for answer in answers] for step in range(3))
        _assert_right(once, _reference()[1], strategy)
        single, double = _whole(once), _whole(twice)
        assert all(torch.equal(double[name], 2 * gradient) for name, gradient in single.items()), strategy
        _assert_right(thrice, _reference((0, 0, 1))[1], strategy)


BY_MICROBATCH = pl.DataParallel("zero3", granularity="microbatch")
IN_BETWEEN = list(product(("1f1b", "zb-v", "dualpipev"), ("ddp", "zero2", "zero3", BY_MICROBATCH)))
RECOMPUTED = list(product(SPLIT, ("ddp", "zero3", BY_MICROBATCH)))


def _few(cases: list[Configuration], columns: int) -> list[Configuration]:
    """Every other one of a table, row by row."""
    return [case for place, case in enumerate(cases) if (place // columns + place % columns) % 2 == 0]


def _evaluate_in_between(rank: int, cases: Sequence[Configuration]) -> list[tuple[object, ...]]:
    mesh = pl.Mesh(pp=P, dp=D)
    found = []
    for name, data in cases:
        with _pipeline(mesh, name, data) as pipe:
            losses = [float(pipe.evaluate(*_part(mesh)))]
            gradient_free = all(p.grad is None for p in pipe.parameters())
            losses.append(float(pipe.step(*_part(mesh))))
            before = [None if p.grad is None else (p.grad, p.grad.clone()) for p in pipe.parameters()]
            losses.append(float(pipe.evaluate(*_part(mesh))))
            pipe.forward(_part(mesh)[0])
            same = all(
                p.grad is None if b is None else p.grad is b[0] and torch.equal(*b)
                for p, b in zip(pipe.parameters(), before, strict=True)
            )
            losses.append(float(pipe.step(*_part(mesh))))
        found.append((f"{name} {data}", losses, gradient_free, same, _held(pipe)))
    return found


@pytest.mark.parametrize("cases", fewer(_few(IN_BETWEEN, 4), IN_BETWEEN), ids=["few", "all"])
def test_evaluation_between_step_and_update_leaves_gradients_alone_on_v_schedules_too(
    cases: Sequence[Configuration],
) -> None:
    expected_loss, _ = _reference()
    _, twice = _reference((0, 0))
    for of_configuration in zip(*run_ranks(_evaluate_in_between, P * D, cases), strict=True):
        what = of_configuration[0][0]
        for _, losses, gradient_free, same, _ in of_configuration:
            assert losses == pytest.approx([expected_loss] * 4, rel=1e-12), what
            assert gradient_free, what
            assert same, what
        _assert_right([held for *_, held in of_configuration], twice, what)


def _split_backward(rank: int, strategies: Sequence[DataStrategy]) -> list[tuple[str, float, Held]]:
    mesh = pl.Mesh(pp=P, dp=D)
    found = []
    for row, name in enumerate(SPLIT):
        granularities = ZERO3_GRANULARITIES if strategies else ZERO3_GRANULARITIES[row % 2 :][:1]
        zero3 = [pl.DataParallel("zero3", granularity=granularity) for granularity in granularities]
        for data in (*strategies, *zero3):
            with _pipeline(mesh, name, data) as pipe:
                assert pipe.schedule.split_backwards
                loss = float(pipe.step(*_part(mesh)))
                found.append((f"{name} {data}", loss, _held(pipe)))
    return found


@pytest.mark.parametrize("strategies", fewer((), STRATEGIES), ids=["granularities", "strategies too"])
def test_split_backwards_reduce_all_gradients(strategies: Sequence[DataStrategy]) -> None:
    """Every schedule with every strategy: `test_every_schedule_with_every_strategy_equals_one_process`."""
    expected_loss, expected = _reference()
    for of_configuration in zip(*run_ranks(_split_backward, P * D, strategies), strict=True):
        what = of_configuration[0][0]
        assert [loss for _, loss, _ in of_configuration] == pytest.approx([expected_loss] * 4, rel=1e-12), what
        _assert_right([held for *_, held in of_configuration], expected, what)


def _recompute(rank: int, cases: Sequence[Configuration]) -> list[tuple[str, list[int], Held]]:
    mesh = pl.Mesh(pp=P, dp=D)
    found = []
    for name, data in cases:
        model = _model(checkpointed=True)
        with _pipeline(mesh, name, data, model) as pipe:
            pipe.step(*_part(mesh))
            calls = [block.calls for block in model.modules() if isinstance(block, Checkpointed)]
            found.append((f"{name} {data}", calls, _held(pipe)))
    return found


@pytest.mark.parametrize("cases", fewer(_few(RECOMPUTED, 3), RECOMPUTED), ids=["few", "all"])
def test_split_backwards_recompute_a_checkpointed_block_once(cases: Sequence[Configuration]) -> None:
    _, expected = _reference()
    for of_configuration in zip(*run_ranks(_recompute, P * D, cases), strict=True):
        what = of_configuration[0][0]
        calls = [of_rank for _, of_rank, _ in of_configuration]
        # A forward and a recomputation for each micro-batch, of the blocks that this process holds.
        assert all(count in (0, 2 * M) for of_rank in calls for count in of_rank), (what, calls)
        assert sum(map(sum, calls)) == D * 4 * 2 * M, (what, calls)
        plain = [{name.replace(".inner.", "."): part for name, part in held.items()} for *_, held in of_configuration]
        _assert_right(plain, expected, what)
