"""Loss, gradients and training of every synchronous schedule against plain accumulation, all ranks in this process."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.engine.worker import RUNNABLE_OPS
from pipeloom.errors import InputError, RunError, StageError
from pipeloom.ir import Action, Op, Orders, Schedule
from tests.cpu.pairwise import fewer, of_grid
from tests.cpu.reference import Checkpointed, accumulate, language_loss, make_gpt, make_mlp, tokens

mse = nn.functional.mse_loss
SIZES = list(itertools.product(("naive", "gpipe", "1f1b"), (1, 2, 4), range(1, 10)))


def _batch(samples: int = 9, width: int = 8, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, width, generator=generator, dtype=dtype) for _ in range(2))


def _assert_equal_gradients(pipe: pl.Pipeline, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_loss_gradients_and_norm_are_bitwise_those_of_accumulation(transport: str) -> None:
    inputs, targets = _batch()
    for name, num_ranks, num_microbatches in SIZES if transport == "loopback" else SIZES[::4]:
        reference, model = make_mlp(), make_mlp()
        expected = accumulate(reference, mse, inputs, targets, num_microbatches)
        schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
        with pl.Pipeline(model, schedule, loss_fn=mse, transport=transport) as pipe:
            assert torch.equal(pipe.step(inputs, targets), expected), (name, num_ranks, num_microbatches)
            _assert_equal_gradients(pipe, reference)
            predicted = pl.check(schedule).live_activations
            assert tuple(pipe.memory.peak_live_activations.values()) == predicted
            assert set(pipe.memory.live_activations.values()) == {0}
            norm = pl.clip_grad_norm(pipe, 0.01)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.01))
            _assert_equal_gradients(pipe, reference)


def _descending_gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe as the paper draws it: backwards in the opposite order of forwards."""
    schedule = pl.schedules.gpipe(num_ranks=num_ranks, num_microbatches=num_microbatches)
    orders: Orders = tuple(order[:num_microbatches] + order[num_microbatches:][::-1] for order in schedule.orders)
    return Schedule(
        name="gpipe-descending", num_microbatches=num_microbatches, placement=schedule.placement, orders=orders
    )


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 9)])
def test_descending_backwards_agree_to_summation_order(num_ranks: int, num_microbatches: int) -> None:
    inputs, targets = _batch(dtype=torch.float64)
    reference, model = make_mlp(dtype=torch.float64), make_mlp(dtype=torch.float64)
    accumulate(reference, mse, inputs, targets, num_microbatches)
    with pl.Pipeline(model, _descending_gpipe(num_ranks, num_microbatches), loss_fn=mse) as pipe:
        pipe.step(inputs, targets)
        expected = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-15)


def _v_schedule(num_microbatches: int) -> Schedule:
    """Two ranks, four stages in a V: stages 1 and 2 are neighbours on one rank, 0 and 3 on the other."""
    placement = pl.Placement.v(2)
    orders: list[list[Action]] = [[], []]
    for b in range(num_microbatches):
        for stage in (0, 1, 2, 3):
            orders[placement.rank_of(stage, b)].append(Action(stage, Op.F, b))
        for stage in (3, 2, 1, 0):
            orders[placement.rank_of(stage, b)].append(Action(stage, Op.B, b))
    return Schedule(name="v", num_microbatches=num_microbatches, placement=placement, orders=tuple(map(tuple, orders)))


def _looped_schedule(num_microbatches: int) -> Schedule:
    """Two ranks, four stages in a loop: activations wrap from rank 1 to rank 0, beside gradients on the same pair."""
    placement = pl.Placement.loop(2, 2)
    orders: list[list[Action]] = [[], []]
    for chunk in (0, 1):
        for d in (0, 1):
            orders[d] += [Action(2 * chunk + d, Op.F, b) for b in range(num_microbatches)]
    for chunk in (1, 0):
        for d in (0, 1):
            orders[d] += [Action(2 * chunk + d, Op.B, b) for b in range(num_microbatches)]
    return Schedule(
        name="looped", num_microbatches=num_microbatches, placement=placement, orders=tuple(map(tuple, orders))
    )


def _bidirectional_schedule(num_microbatches: int) -> Schedule:
    """Two ranks that both hold both stages: even micro-batches go down, odd ones up."""
    placement = pl.Placement.bidirectional(2)
    orders: list[list[Action]] = [[], []]
    for b in range(num_microbatches):
        for stage, op in ((0, Op.F), (1, Op.F), (1, Op.B), (0, Op.B)):
            orders[placement.rank_of(stage, b)].append(Action(stage, op, b))
    return Schedule(
        name="both-ways", num_microbatches=num_microbatches, placement=placement, orders=tuple(map(tuple, orders))
    )


@pytest.mark.parametrize("make_schedule", [_v_schedule, _looped_schedule])
@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_several_chunks_a_rank(make_schedule, transport: str) -> None:
    inputs, targets = _batch()
    reference, model = make_mlp(), make_mlp()
    expected = accumulate(reference, mse, inputs, targets, 3)
    with pl.Pipeline(model, make_schedule(3), loss_fn=mse, cut=[1, 2, 2, 1], transport=transport) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
        _assert_equal_gradients(pipe, reference)
        pipe.evaluate(inputs, targets)
        torch.testing.assert_close(pipe.forward(inputs), reference(inputs))


@pytest.mark.parametrize("replicas", [(2, 1), (1, 2, 3), (3, 1, 2)])
def test_stages_on_different_numbers_of_ranks(replicas: tuple[int, ...]) -> None:
    inputs, targets = _batch(dtype=torch.float64)
    reference, model = make_mlp(dtype=torch.float64), make_mlp(dtype=torch.float64)
    expected = accumulate(reference, mse, inputs, targets, 5)
    schedule = pl.schedules.one_f_one_b(num_ranks=sum(replicas), num_microbatches=5, replicas=replicas)
    references = dict(reference.named_parameters())
    with pl.Pipeline(model, schedule, loss_fn=mse) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
        found = list(pipe.named_parameters())
        assert len(found) > len(references)
        for name, parameter in found:
            torch.testing.assert_close(parameter.grad, references[name].grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_replicas_get_the_same_summed_gradients(transport: str) -> None:
    inputs, targets = _batch(dtype=torch.float64)
    reference, model = make_mlp(dtype=torch.float64), make_mlp(dtype=torch.float64)
    for _ in range(2):
        accumulate(reference, mse, inputs, targets, 5)
    with pl.Pipeline(model, _bidirectional_schedule(5), loss_fn=mse, transport=transport) as pipe:
        for _ in range(2):
            pipe.step(inputs, targets)
        copies: dict[str, list[torch.Tensor]] = {}
        for name, parameter in pipe.named_parameters():
            copies.setdefault(name, []).append(parameter.grad)
        for name, parameter in reference.named_parameters():
            assert len(copies[name]) == 2
            assert torch.equal(*copies[name])
            torch.testing.assert_close(copies[name][0], parameter.grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("name", "tied", "num_ranks", "num_microbatches"),
    of_grid(("naive", "gpipe", "1f1b"), (False, True), (1, 2, 4), (1, 3, 7)),
)
def test_gpt(name: str, tied: bool, num_ranks: int, num_microbatches: int) -> None:
    inputs, targets = tokens(7)
    reference, model = make_gpt(tied=tied), make_gpt(tied=tied)
    expected = accumulate(reference, language_loss, inputs, targets, num_microbatches)
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
        if not tied:
            _assert_equal_gradients(pipe, reference)
        references = dict(reference.named_parameters())
        for parameter_name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, references[parameter_name].grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("num_steps", fewer(6, 20))
@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_steps_are_bitwise_those_of_one_process(name: str, num_ranks: int, num_steps: int) -> None:
    reference, model = make_gpt(), make_gpt()
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=4)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(num_steps):
            inputs, targets = tokens(6, seed=step)
            expected = accumulate(reference, language_loss, inputs, targets, 4)
            assert torch.equal(pipe.step(inputs, targets), expected)
            norm = pl.clip_grad_norm(pipe, 1.0)
            assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
            for o in (optimizer, expected_optimizer):
                o.step()
                o.zero_grad()
        parameters = dict(reference.named_parameters())
        assert all(torch.equal(p, parameters[parameter_name]) for parameter_name, p in pipe.named_parameters())


def test_tied_copies_stay_bitwise_equal_through_training() -> None:
    reference, model = make_gpt(tied=True, dtype=torch.float64), make_gpt(tied=True, dtype=torch.float64)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    with pl.Pipeline(model, pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=3), loss_fn=language_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(10):
            inputs, targets = tokens(5, seed=step)
            accumulate(reference, language_loss, inputs, targets, 3)
            pipe.step(inputs, targets)
            norm = pl.clip_grad_norm(pipe, 1.0)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(reference.parameters(), 1.0), rtol=1e-12, atol=0)
            for o in (optimizer, expected_optimizer):
                o.step()
                o.zero_grad()
        embeddings = [p for name, p in pipe.named_parameters() if name == "embedding.weight"]
        assert len(embeddings) == 2
        assert torch.equal(*embeddings)
        torch.testing.assert_close(embeddings[0], reference.embedding.weight, rtol=1e-9, atol=1e-12)


def test_activation_checkpointing_recomputes_once() -> None:
    inputs, targets = _batch()
    reference = make_mlp()
    expected = accumulate(reference, mse, inputs, targets, 3)
    model = nn.Sequential(*[Checkpointed(layer) for layer in make_mlp()])
    with pl.Pipeline(model, pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=3), loss_fn=mse) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
    for (name, parameter), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, other.grad), name
    assert [layer.calls for layer in model] == [6] * 6  # three forwards, three recomputations


def test_compiled_blocks() -> None:
    inputs, targets = _batch()
    reference = make_mlp()
    expected = accumulate(reference, mse, inputs, targets, 3)
    model = nn.Sequential(*[torch.compile(layer, backend="aot_eager") for layer in make_mlp()])
    with pl.Pipeline(model, pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=3), loss_fn=mse) as pipe:
        torch.testing.assert_close(pipe.step(inputs, targets), expected)
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_in_place_operations_at_a_cut() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 8))

    inputs, targets = _batch(8)
    reference, model = build(), build()
    expected = accumulate(reference, mse, inputs, targets, 2)
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=mse, cut=[2, 2]) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
        _assert_equal_gradients(pipe, reference)


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2)
        x += 1
        return self.linear(x)


def test_functional_in_place_operations_at_a_cut() -> None:
    def build() -> nn.Sequential:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 8), _InPlace())

    inputs, targets = _batch(8)
    reference, model = build(), build()
    with pl.Pipeline(model, pl.schedules.gpipe(num_ranks=2, num_microbatches=4), loss_fn=mse) as pipe:
        for _ in range(2):
            expected = accumulate(reference, mse, inputs, targets, 4)
            assert torch.equal(pipe.step(inputs, targets), expected)
        _assert_equal_gradients(pipe, reference)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_autocast_reaches_every_rank(transport: str) -> None:
    inputs, targets = _batch(8)
    seen = []

    def loss_fn(output, target):
        seen.append(output.dtype)
        return mse(output.float(), target)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=loss_fn, transport=transport) as pipe:
        with torch.autocast("cpu", torch.bfloat16):
            pipe.step(inputs, targets)
        assert len(seen) >= 2  # the first steps ask more often
        assert {*seen} == {torch.bfloat16}


def test_what_a_step_cannot_do_is_refused_at_once() -> None:
    inputs, targets = _batch(8)
    schedule = pl.schedules.gpipe(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=mse) as pipe:
        with (
            torch.no_grad(),
            pytest.raises(InputError, match=r"gradients, and they are disabled\. .*no_grad"),
        ):
            pipe.step(inputs, targets)
        with pytest.raises(InputError, match="8 samples and targets 6"):
            pipe.step(inputs, targets[:6])
        pipe.step(inputs, targets)
    with pytest.raises(InputError, match="loss_fn is a module with parameters"):
        pl.Pipeline(make_mlp(), schedule, loss_fn=nn.Linear(1, 1))
    split_orders = tuple(
        tuple(a.with_op(op) for a in order for op in ((Op.I, Op.W) if a.op is Op.B else (a.op,)))
        for order in schedule.orders
    )
    if not {Op.I, Op.W} <= RUNNABLE_OPS:
        with pytest.raises(InputError, match="0I0"):
            pl.Pipeline(make_mlp(), replace(schedule, orders=split_orders), loss_fn=mse)


def test_a_failed_step_lets_go_of_its_activations() -> None:
    inputs, targets = _batch(8)

    def loss_fn(output, target):
        raise ValueError("no loss today")

    schedule = pl.schedules.gpipe(num_ranks=3, num_microbatches=4)
    pipe = pl.Pipeline(make_mlp(), schedule, loss_fn=loss_fn)
    with pytest.raises(StageError, match="rank 2, stage 2, action 2F0, micro-batch 0: ValueError: no loss today"):
        pipe.step(inputs, targets)
    assert set(pipe.memory.live_activations.values()) == {0}
    with pytest.raises(RunError, match="no loss today"):
        pipe.step(inputs, targets)


class _Merging(nn.Linear):
    """Changes its weight in evaluation mode and back, as LoRA layers do."""

    merged = False

    def train(self, mode: bool = True):
        with torch.no_grad():
            if not mode and not self.merged:
                self.weight.add_(1.0)
            if mode and self.merged:
                self.weight.sub_(1.0)
        self.merged = not mode
        return super().train(mode)


def test_evaluation_restores_modules_that_do_more_than_set_a_flag() -> None:
    inputs, targets = _batch(8)
    model = nn.Sequential(*[_Merging(8, 8) for _ in range(4)])
    before = [layer.weight.clone() for layer in model]
    with pl.Pipeline(model, pl.schedules.gpipe(num_ranks=2, num_microbatches=4), loss_fn=mse) as pipe:
        pipe.evaluate(inputs, targets)
    assert all(layer.training and not layer.merged for layer in model)
    for layer, weight in zip(model, before, strict=True):
        torch.testing.assert_close(layer.weight, weight)


def test_a_tied_model_is_the_one_that_trains() -> None:
    """With all ranks in one process the user's own modules run, so the model can be saved and used as it is."""
    model = make_gpt(tied=True)
    with pl.Pipeline(model, pl.schedules.gpipe(num_ranks=2, num_microbatches=2), loss_fn=language_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        inputs, targets = tokens(4)
        pipe.step(inputs, targets)
        optimizer.step()
        torch.testing.assert_close(language_loss(model(inputs), targets), pipe.evaluate(inputs, targets))
        assert torch.equal(model.head.weight, model.embedding.weight)


def test_frozen_stages() -> None:
    inputs, targets = _batch()
    for frozen in ((0, 1), (2, 3), (4, 5)):
        reference, model = make_mlp(), make_mlp()
        for net in (reference, model):
            for layer in frozen:
                net[layer].requires_grad_(False)
        expected = accumulate(reference, mse, inputs, targets, 4)
        with pl.Pipeline(model, pl.schedules.one_f_one_b(num_ranks=3, num_microbatches=4), loss_fn=mse) as pipe:
            assert torch.equal(pipe.step(inputs, targets), expected)
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None)
            assert parameter.grad is None or torch.equal(parameter.grad, other.grad)


def test_the_users_model_is_not_copied_in_one_process() -> None:
    model = make_mlp()
    before = copy.deepcopy(model)
    with pl.Pipeline(model, pl.schedules.gpipe(num_ranks=3, num_microbatches=2), loss_fn=mse) as pipe:
        assert {id(p) for p in pipe.parameters()} == {id(p) for p in model.parameters()}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
