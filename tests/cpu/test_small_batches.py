"""Batches that a rank cannot use, and evaluations of fewer samples than micro-batches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, make_mlp, tokens

mse = nn.functional.mse_loss
_MODEL = make_mlp(depth=6)
WHO = ["all", "all but the middle, which passes none", 0, 1, 2]


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 8, generator=generator), torch.randn(samples, 8, generator=generator)


def _given(rank: int, who: Any) -> tuple[Tensor | None, Tensor | None]:
    """What a rank passes: a batch that is too small on some ranks."""
    if who == "all" or who == rank:
        return _batch(2)
    if isinstance(who, int):
        return _batch(8)
    return (None, None) if rank == 1 else _batch(2)


def _answers(make: Callable[[], tuple[pl.Pipeline, Callable[..., Any]]], rank: int) -> list[Any]:
    """Losses and errors of steps whose batches are valid or not."""
    pipe, step = make()
    found: list[Any] = []
    with pipe:
        for who in [None, *WHO, None]:
            try:
                found.append(float(step(*(_batch(8) if who is None else _given(rank, who)))))
            except InputError as error:
                found.append(str(error))
        found.append(float(sum(p.grad.double().square().sum() for p in pipe.parameters() if p.grad is not None)))
    return found


def _pipeline(name: str, num_ranks: int, transport: str = "auto", **options: Any) -> pl.Pipeline:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=6)
    return pl.Pipeline(copy.deepcopy(_MODEL), schedule, loss_fn=mse, transport=transport, **options)


def _check(found: list[list[Any]], num_ranks: int) -> None:
    with _pipeline("1f1b", num_ranks, "loopback") as pipe:
        loss = float(pipe.step(*_batch(8)))
        pipe.step(*_batch(8))
        square = float(sum(p.grad.double().square().sum() for p in pipe.parameters()))
    assert sum(answers[-1] for answers in found) == pytest.approx(square, rel=1e-5)
    for number in range(len(WHO) + 2):
        answers = [each[number] for each in found]
        if number in (0, len(WHO) + 1):
            assert answers == [pytest.approx(loss, rel=1e-5)] * num_ranks
        else:
            assert all("hold 2 samples for 6 micro-batches" in text and "\n" not in text for text in answers), answers


def _run(rank: int, name: str, transport: str, options: dict[str, Any]) -> list[Any]:
    def make() -> tuple[pl.Pipeline, Callable[..., Any]]:
        pipe = _pipeline(name, 3, transport, **options)
        return pipe, pipe.step

    return _answers(make, rank)


@pytest.mark.parametrize(
    ("name", "transport"),
    [("1f1b", "shared-memory"), ("zb-v", "torch")],
)
def test_a_batch_that_a_rank_cannot_use_is_refused_by_all_of_them(name: str, transport: str) -> None:
    _check(run_ranks(_run, 3, name, transport, {}), 3)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo", "v-half"])
def test_refusals_of_every_kind_of_schedule(name: str) -> None:
    _check(pl.run_threads(3, lambda: _run(_rank(), name, "auto", {"mesh": pl.Mesh(pp=3)})), 3)


def _rank() -> int:
    from pipeloom.processes.members import thread_members

    members = thread_members()
    assert members is not None
    return members.rank


def test_different_batches_on_first_and_last_rank_are_refused_by_all() -> None:
    def run() -> list[Any]:
        found: list[Any] = []
        with _pipeline("1f1b", 3, mesh=pl.Mesh(pp=3)) as pipe:
            for sizes in ((8, 8, 8), (8, 8, 6), (6, 8, 8), (8, 8, 8)):
                for call in (pipe.step, pipe.evaluate):
                    try:
                        found.append(float(call(*_batch(sizes[_rank()]))))
                    except InputError as error:
                        found.append(str(error))
        return found

    for answers in zip(*pl.run_threads(3, run), strict=True):
        if isinstance(answers[0], float):
            assert len(set(answers)) == 1
        else:
            assert all("6" in text and "8" in text for text in answers), answers


def test_batches_of_different_forms_are_refused_by_all() -> None:
    x, y = _batch(8)
    given = {  # on rank 2, and what all ranks say
        "lengths": (
            (x[:, :6], y[:, :6]),
            r"inputs are float32 \[samples, 8\] on rank 0 and float32 \[samples, 6\] on rank 2",
        ),
        "types": (
            (x, y.double()),
            r"targets are float32 \[samples, 8\] on rank 0 and float64 \[samples, 8\] on rank 2",
        ),
        "keys": (
            ({"x": x}, y),
            r"inputs are float32 \[samples, 8\] on rank 0 and {'x': float32 \[samples, 8\]} on rank 2",
        ),
        "unread": ((torch.empty(8, 0), y), ""),
        "none": ((None, y), ""),
    }

    def run() -> list[Any]:
        found: list[Any] = []
        with _pipeline("1f1b", 3, mesh=pl.Mesh(pp=3)) as pipe:
            for inputs, targets in (pair if _rank() == 2 else (x, y) for pair, _ in given.values()):
                for call in (pipe.step, pipe.evaluate):
                    try:
                        found.append(float(call(inputs, targets)))
                    except InputError as error:
                        found.append(str(error))
        return found

    expected = [words for _, words in given.values() for _ in range(2)]
    for answers, words in zip(zip(*pl.run_threads(3, run), strict=True), expected, strict=True):
        assert all(isinstance(each, str) == bool(words) for each in answers), answers
        assert all(re.match(words, str(each)) for each in answers), answers


# Evaluations


def _small(name: str, num_ranks: int, options: dict[str, Any], num_samples: int) -> list[Any]:
    inputs, targets = _batch(num_samples)
    with _pipeline(name, num_ranks, **options) as pipe:
        losses = [float(pipe.evaluate(inputs, targets))]
        output = pipe.forward(inputs)
        losses.append(float(pipe.step(*_batch(8))))
        for refused in (pipe.evaluate, pipe.step):
            with pytest.raises(InputError):
                refused(*(value[:0] for value in _batch(8)))
        losses.append(float(pipe.evaluate(inputs, targets)))
    return [losses, None if output is None else output.detach()]


@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize(("name", "num_ranks"), [("gpipe", 2), ("interleaved", 3), ("zb-v", 2), ("chimera", 4)])
def test_evaluations_of_fewer_samples_than_microbatches(name: str, num_ranks: int, num_samples: int) -> None:
    inputs, targets = _batch(num_samples)
    expected = _MODEL(inputs).detach()
    found = _small(name, num_ranks, {"transport": "loopback"}, num_samples)
    found_in_threads = pl.run_threads(
        num_ranks, lambda: _small(name, num_ranks, {"mesh": pl.Mesh(pp=num_ranks)}, num_samples)
    )
    for losses, output in [found, *found_in_threads]:
        assert losses[0] == losses[2] == pytest.approx(float(mse(expected, targets)), rel=1e-5)
        assert output is None or torch.allclose(output, expected, atol=1e-6)
    assert any(output is not None for _, output in found_in_threads)


@pytest.mark.parametrize("data", ["ddp", "zero3"])
def test_replicas_of_unequal_sizes_evaluate_in_the_microbatches_of_the_smallest(data: str) -> None:
    sizes = (7, 2)
    whole = [torch.cat(parts) for parts in zip(*map(_batch, sizes), strict=True)]
    expected = float(mse(_MODEL(whole[0]).detach(), whole[1]))

    def run() -> list[Any]:
        mesh = pl.Mesh(pp=2, dp=2)
        replica = mesh.coordinate("dp")
        with _pipeline("1f1b", 2, mesh=mesh, data=data) as pipe:
            losses = [float(pipe.evaluate(*_batch(sizes[replica])))]
            with pytest.raises(InputError, match="hold 2 samples for 6 micro-batches"):
                pipe.step(*_batch(sizes[replica]))
            losses.append(float(pipe.step(*_batch(sizes[0]))))
            output = pipe.forward(_batch(sizes[replica])[0])
        return [losses, output, replica]

    for losses, output, replica in pl.run_threads(4, run):
        assert losses[0] == pytest.approx(expected, rel=1e-5)
        assert output is None or torch.allclose(output, _MODEL(_batch(sizes[replica])[0]), atol=1e-6)


def test_a_refused_step_keeps_the_gradients_of_tied_parameters_and_pending_updates() -> None:
    """Gradients of earlier steps are set aside while a step runs; a post-validated update is still to be validated."""
    model = make_gpt(tied=True)

    def run(sizes: tuple[int, ...], step: Callable[[pl.Pipeline], Callable[..., Any]]) -> list[Any]:
        schedule = pl.schedules.one_f_one_b(num_ranks=3, num_microbatches=6)
        with pl.Pipeline(copy.deepcopy(model), schedule, loss_fn=language_loss, mesh=pl.Mesh(pp=3)) as pipe:
            call = step(pipe)
            for size in sizes:
                try:
                    call(*tokens(6 if _rank() == 0 else size))
                except InputError:
                    assert size < 6
        return [(name, p.detach().clone(), p.grad) for name, p in pipe.named_parameters()]

    def post_validated(pipe: pl.Pipeline) -> Callable[..., Any]:
        return pl.PostValidatedStep(pipe, torch.optim.SGD(pipe.parameters(), lr=0.5), max_norm=0.1).step

    for kind in (lambda pipe: pipe.step, post_validated):
        expected, found = (
            pl.run_threads(3, lambda sizes=sizes, kind=kind: run(sizes, kind)) for sizes in ((6, 6, 6), (6, 2, 6, 2, 6))
        )
        for one, other in zip(expected, found, strict=True):
            for (name, *values), (_, *others) in zip(one, other, strict=True):
                for value, again in zip(values, others, strict=True):
                    assert value is again is None or torch.equal(value, again), name
