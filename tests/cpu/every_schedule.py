"""Every family of the table at many sizes, each trained and compared with plain accumulation: used by several tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.errors import ScheduleError
from pipeloom.ir import Op, Schedule
from tests.cpu.reference import Checkpointed, accumulate, checkpoint_blocks, language_loss, make_gpt, tokens

F64 = torch.float64
# Of uneven, tied and checkpointed: every pair of two of them, in every state, in four cases.
PAIRWISE = ((False, False, False), (True, True, False), (False, True, True), (True, False, True))


class Case(NamedTuple):
    """One run: a schedule and what else matters."""

    family: str
    num_ranks: int
    num_chunks: int
    num_microbatches: int
    uneven: bool
    tied: bool
    checkpointed: bool

    @property
    def schedule(self) -> Schedule:
        return _build(self.family, self.num_ranks, self.num_microbatches, self.num_chunks)


@cache
def _build(family: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    return pl.schedules.build(family, **sizes)


def _is_legal(*sizes) -> bool:
    try:
        _build(*sizes)
    except ScheduleError:
        return False
    return True


def sizes(num_ranks: int) -> Iterator[tuple[str, int, list[int]]]:
    """Every family with every legal number of chunks up to 3, and three numbers of micro-batches: from its least up."""
    for family, row in pl.schedules.SYNCHRONOUS.items():
        for num_chunks in (1, 2, 3) if row.chunks is None else (row.chunks,):
            tried = range(1, 4 * num_ranks + 1)
            legal = [m for m in tried if _is_legal(family, num_ranks, m, num_chunks)] if family != "search" else [1, 4]
            if legal:
                many = next((m for m in legal if m > 2 * num_ranks), legal[-1])
                yield family, num_chunks, sorted({*legal[:2], many if family != "search" else 4})


def grid(num_ranks: int, each: int) -> list[Case]:
    """`each` cases for every family and number of chunks; the other factors go round, so that all pairs come."""
    turns: Counter[str] = Counter()
    cases = []
    for family, num_chunks, microbatches in sizes(num_ranks):
        for _ in range(each):
            turn = turns[family] + num_ranks
            turns[family] += 1
            shift = 0 if len(microbatches) % 2 else turn // 4  # so that each number meets each row of PAIRWISE
            m = microbatches[(turn + shift) % len(microbatches)]
            cases.append(Case(family, num_ranks, num_chunks, m, *PAIRWISE[turn % 4]))
    return cases


def thinned_sizes(num_ranks: int) -> list[tuple[str, int, list[int]]]:
    """Of `sizes`, those that every run of the tests has."""
    return [row for row in sizes(num_ranks) if num_ranks == 2 or row[1] < 3]


def thinned(num_ranks: int) -> list[Case]:
    """Two cases for every family and number of chunks, with the least micro-batches and with more; on three ranks one.

    On more than two ranks, no more than two chunks: other numbers of chunks run there alike.
    """
    turns: Counter[str] = Counter()
    cases = []
    for family, num_chunks, (least, *more) in thinned_sizes(num_ranks):
        for index in range(1 if num_ranks == 3 else 2):
            turn = turns[family] + num_ranks
            turns[family] += 1
            m = more[turn % len(more)] if index and more else least
            cases.append(Case(family, num_ranks, num_chunks, m, *PAIRWISE[turn % 4]))
    return list(dict.fromkeys(cases))


def whole_grid(num_ranks: int) -> list[Case]:
    """Every family, number of chunks and of micro-batches with every pair of the other factors."""
    return [
        Case(family, num_ranks, num_chunks, m, *factors)
        for family, num_chunks, microbatches in sizes(num_ranks)
        for m in microbatches
        for factors in PAIRWISE
    ]


class _Expected(NamedTuple):
    losses: list[Tensor]
    gradients: dict[str, Tensor]


@cache
def _reference(num_layers: int, num_microbatches: int, tied: bool, device: str) -> _Expected:
    """Losses of two steps and the gradients after both."""
    model = make_gpt(tied=tied, layers=num_layers, dtype=F64).to(device)
    losses = [
        accumulate(model, language_loss, *_batch(num_microbatches, step, device), num_microbatches) for step in (0, 1)
    ]
    return _Expected(losses, {name: parameter.grad for name, parameter in model.named_parameters()})


def _batch(num_microbatches: int, step: int, device: str) -> tuple[Tensor, ...]:
    """One sample more than micro-batches, so that they are of different sizes where there are several."""
    return tuple(values.to(device) for values in tokens(num_microbatches + 1, seed=step))


def is_bitwise(schedule: Schedule, tied: bool) -> bool:
    """Whether the weights' gradients of every stage add up in the reference's order, on one rank."""
    seen: defaultdict[int, list[int]] = defaultdict(list)
    for _, action in schedule.actions():
        if action.op in (Op.B, Op.W):
            seen[action.stage].append(action.microbatch)
    replicated = any(len(ranks) > 1 for ranks in schedule.placement.replicas)
    return not tied and not replicated and all(order == sorted(order) for order in seen.values())


def train_and_compare(case: Case, transport: str, device: str = "cpu") -> None:
    """Two steps before an update, with an evaluation before and after."""
    schedule = case.schedule
    num_stages, m = schedule.num_stages, case.num_microbatches
    num_layers = max(2, num_stages)
    cut = None
    if case.uneven and num_stages > 1:  # the first stage has two blocks more than the last, which has the head alone
        cut = [2] + [1] * (num_stages - 2) + [0]
    model = make_gpt(tied=case.tied, layers=num_layers, dtype=F64).to(device)
    if case.checkpointed:
        checkpoint_blocks(model)
    expected = _reference(num_layers, m, case.tied, device)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, cut=cut or "layers", transport=transport) as pipe:
        for step in (0, 1):
            batch = _batch(m, step, device)
            if step == 0:
                torch.testing.assert_close(pipe.evaluate(*batch), expected.losses[step], rtol=1e-12, atol=0)
            assert torch.equal(pipe.step(*batch), expected.losses[step]), case
            live = pl.check(schedule).live_activations
            assert pipe.memory.peak_live_activations == {rank: live[rank] for rank in pipe.executor.local_ranks}, case
            assert set(pipe.memory.live_activations.values()) == {0}, case
        _compare_gradients(pipe, expected, case)
        torch.testing.assert_close(pipe.evaluate(*batch), expected.losses[1], rtol=1e-12, atol=0)
        _compare_gradients(pipe, expected, case)
        if case.checkpointed and len(pipe.executor.local_ranks) == case.num_ranks:
            _check_recomputation(pipe, m)


def _compare_gradients(pipe: pl.Pipeline, expected: _Expected, case: Case) -> None:
    bitwise = is_bitwise(pipe.schedule, case.tied)
    copies: dict[str, Tensor] = {}
    for name, parameter in pipe.named_parameters():
        gradient, wanted = parameter.grad, expected.gradients[name.replace(".inner", "")]
        if bitwise:
            assert torch.equal(gradient, wanted), (case, name)
        else:
            torch.testing.assert_close(
                gradient, wanted, rtol=1e-12, atol=1e-15, msg=lambda m, n=name: f"{case} {n} {m}"
            )
        assert torch.equal(copies.setdefault(name, gradient), gradient), (case, name)


def _check_recomputation(pipe: pl.Pipeline, num_microbatches: int) -> None:
    """In each of two steps a block runs forward and is recomputed once; two evaluations recompute nothing."""
    calls: Counter[str] = Counter()
    for stage in pipe.modules():
        calls.update({n: module.calls for n, module in stage.named_modules() if isinstance(module, Checkpointed)})
    assert set(calls.values()) == {(2 * 2 + 2) * num_microbatches}
