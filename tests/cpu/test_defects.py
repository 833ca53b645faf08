"""What torch.distributed.pipelining 2.13 gets wrong or wastes, each as a test that pipeloom passes.

All ranks in this process unless processes are the point. Evaluation on V placements: `test_every_schedule`.
"""

from __future__ import annotations

import copy
import cProfile
import gc
import pstats

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.ir import Action, Op, Placement, Schedule
from pipeloom.passes import lower
from pipeloom.report import print_timeline
from tests.cpu.pairwise import in_turn
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import (
    Checkpointed,
    accumulate,
    checkpoint_blocks,
    language_loss,
    make_gpt,
    make_mlp,
    tokens,
)

mse = nn.functional.mse_loss
NAMES = ["naive", "gpipe", "1f1b"]


def _batch(samples: int = 8, width: int = 8):
    generator = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, width, generator=generator) for _ in range(2))


def _pipeline(model: nn.Module, name: str = "1f1b", num_ranks: int = 2, num_microbatches: int = 4, **options):
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return pl.Pipeline(model, schedule, loss_fn=options.pop("loss_fn", mse), **options)


@pytest.mark.parametrize("name", NAMES)
def test_steps_before_one_optimizer_step_add_up(name: str) -> None:
    inputs, targets = _batch()
    reference, model = make_mlp(), make_mlp()
    with _pipeline(model, name) as pipe:
        for _ in range(3):
            accumulate(reference, mse, inputs, targets, 4)
            pipe.step(inputs, targets)
    for a, b in zip(reference.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("tied", [False, True])
def test_steps_add_up_for_tied_parameters_too(tied: bool) -> None:
    inputs, targets = tokens(8)
    reference, model = make_gpt(tied=tied, dtype=torch.float64), make_gpt(tied=tied, dtype=torch.float64)
    with _pipeline(model, loss_fn=language_loss) as pipe:
        for _ in range(3):
            accumulate(reference, language_loss, inputs, targets, 4)
            pipe.step(inputs, targets)
        expected = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_and_forward_leave_gradients_and_modes_alone(name: str) -> None:
    inputs, targets = tokens(8)
    model = make_gpt(tied=True)
    model.blocks[1].eval()
    with _pipeline(model, name, loss_fn=language_loss) as pipe:
        pipe.evaluate(inputs, targets)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.step(inputs, targets)
        gradients = [(p.grad, p.grad.clone()) for p in pipe.parameters()]
        modes = [m.training for stage in pipe.modules() for m in stage.modules()]
        loss = pipe.evaluate(inputs, targets)
        output = pipe.forward(inputs)
        assert all(p.grad is g and torch.equal(g, c) for p, (g, c) in zip(pipe.parameters(), gradients, strict=True))
        assert [m.training for stage in pipe.modules() for m in stage.modules()] == modes
        torch.testing.assert_close(language_loss(output, targets), loss)
        assert not output.requires_grad


@pytest.mark.usefixtures("new_objects_alone")
def test_receive_buffers_are_bounded_and_nothing_is_held_between_steps() -> None:
    """1F1B holds p - d activations, not M; after a step no tensor of an activation's shape is alive anywhere."""
    inputs, targets = torch.randn(16, 7, 8), torch.randn(16, 7, 8)
    model = make_mlp(4)
    shape = torch.Size((1, 7, 8))

    def alive() -> int:
        gc.collect()
        return sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == shape)

    with _pipeline(model, num_microbatches=16) as pipe:
        assert alive() == 0
        for _ in range(3):
            pipe.step(inputs, targets)
            assert pipe.memory.peak_live_activations == {0: 2, 1: 1}
            assert pipe.memory.live_activations == {0: 0, 1: 0}
            assert alive() == 0
        pipe.evaluate(inputs, targets)
        assert alive() == 0


class _CountsTensors(nn.Module):
    """Counts, at each of its forwards, the tensors of an activation's shape that this process keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.most = 0

    def forward(self, x):
        held = sum(1 for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == x.shape)
        self.most = max(self.most, held)
        return self.inner(x)


def _held(rank: int, num_microbatches: int) -> int:
    gc.collect()
    gc.freeze()  # what the tests before made is not looked through at every forward
    model = nn.Sequential(_CountsTensors(), _CountsTensors())
    with _pipeline(model, num_microbatches=num_microbatches) as pipe:
        for _ in range(2):
            pipe.step(torch.randn(num_microbatches, 3, 8), torch.randn(num_microbatches, 3, 8))
    return model[rank].most


def test_what_a_rank_holds_does_not_grow_with_the_micro_batches() -> None:
    few, many = run_ranks(_held, 2, 6), run_ranks(_held, 2, 24)
    # Each rank holds its slice of the batch besides: one view for each micro-batch. Some more or fewer messages are on
    # their way. One activation kept for each micro-batch would double what is added.
    assert many[0] - few[0] <= 24 - 6 + 4
    assert many[1] - few[1] <= 24 - 6 + 4


@pytest.mark.parametrize(("name", "samples"), in_turn(NAMES, [4, 5, 6, 7, 11]))
def test_batches_that_the_micro_batches_do_not_divide(name: str, samples: int) -> None:
    inputs, targets = _batch(samples)
    reference, model = make_mlp(), make_mlp()
    expected = accumulate(reference, mse, inputs, targets, 4)
    with _pipeline(model, name) as pipe:
        assert torch.equal(pipe.step(inputs, targets), expected)
        torch.testing.assert_close(pipe.forward(inputs), reference(inputs))
        # The loss is the mean over samples, however uneven the pieces.
        torch.testing.assert_close(pipe.evaluate(inputs, targets), mse(reference(inputs), targets))


def _shapes_change(rank: int, transport: str) -> None:
    reference = make_gpt()
    with _pipeline(make_gpt(), loss_fn=language_loss, transport=transport) as pipe:
        for step, (samples, length) in enumerate([(8, 12), (8, 5), (5, 5), (9, 12), (4, 1), (8, 12)]):
            inputs, targets = tokens(samples, length, seed=step)
            expected = accumulate(reference, language_loss, inputs, targets, 4)
            assert torch.equal(pipe.step(inputs, targets), expected)
        gradients = dict(reference.named_parameters())
        assert all(torch.equal(p.grad, gradients[name].grad) for name, p in pipe.named_parameters())


@pytest.mark.parametrize("transport", ["shared-memory", "torch"])
def test_batch_and_sequence_length_change_from_step_to_step(transport: str) -> None:
    run_ranks(_shapes_change, 2, transport)


def test_no_forward_is_run_to_learn_shapes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
    reference = copy.deepcopy(model)
    inputs, targets = _batch(8)
    accumulate(reference, mse, inputs, targets, 4)
    with _pipeline(model) as pipe:
        pipe.evaluate(inputs, targets)
        pipe.step(inputs, targets)
        pipe.evaluate(inputs, targets)
    for layer in (1, 3):
        assert model[layer].num_batches_tracked == 4
        assert torch.equal(model[layer].running_mean, reference[layer].running_mean)
        assert torch.equal(model[layer].running_var, reference[layer].running_var)


def _tied_embeddings(rank: int) -> list[float]:
    with _pipeline(make_gpt(tied=True), loss_fn=language_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for step in range(5):
            pipe.step(*tokens(8, seed=step))
            optimizer.step()
            optimizer.zero_grad()
        return dict(pipe.named_parameters())["embedding.weight"].flatten().tolist()


def test_tied_embeddings_do_not_drift_apart() -> None:
    first, last = run_ranks(_tied_embeddings, 2)
    assert first == last


def test_python_work_an_action_is_bounded() -> None:
    """Counted in function calls rather than seconds: torch's runtime makes several hundred an action."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return x + self.weight

    with _pipeline(nn.Sequential(Tiny(), Tiny()), num_microbatches=32, loss_fn=lambda o, t: o.sum()) as pipe:
        batch = torch.zeros(32, 4), torch.zeros(32)
        pipe.step(*batch)
        profile = cProfile.Profile()
        profile.enable()
        pipe.step(*batch)
        profile.disable()
    num_actions = 2 * 2 * 32  # F and B of two stages
    assert pstats.Stats(profile).total_calls / num_actions < 60


@pytest.mark.parametrize("name", NAMES)
def test_fewer_micro_batches_than_ranks(name: str) -> None:
    inputs, targets = _batch(6)
    for num_microbatches in (1, 2, 3):
        reference, model = make_mlp(), make_mlp()
        expected = accumulate(reference, mse, inputs, targets, num_microbatches)
        with _pipeline(model, name, 4, num_microbatches) as pipe:
            assert torch.equal(pipe.step(inputs, targets), expected)
        for a, b in zip(reference.parameters(), model.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


class _First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)

    def forward(self, ids):
        x = self.embedding(ids)
        return {"x": x, "skip": x * 2, "ids": ids, "mask": ids > 4, "scale": 0.5, "name": "skip", "frozen": x.detach()}


class _Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        x = self.linear(value["x"]) * value["mask"].unsqueeze(-1)
        assert value["name"] == "skip"
        assert value["ids"].dtype == torch.int64
        return x + value["frozen"], [value["skip"], (value["scale"],)], value["ids"]


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 10)

    def forward(self, value):
        x, (skip, (scale,)), _ = value
        return self.linear(x + scale * skip)


def _structured_model() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(_First(), _Middle(), _Last())


def _boundary_values(rank: int | None, transport: str) -> None:
    reference = _structured_model()
    cross_entropy = nn.functional.cross_entropy
    inputs = torch.arange(14).reshape(14) % 10
    expected = accumulate(reference, cross_entropy, inputs, inputs, 4)
    with _pipeline(_structured_model(), num_ranks=3, loss_fn=cross_entropy, transport=transport) as pipe:
        assert torch.equal(pipe.step(inputs, inputs), expected)
        gradients = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, gradients[name].grad), name


@pytest.mark.parametrize("transport", ["loopback", "threads", "shared-memory", "torch"])
def test_structured_boundary_values_and_skip_connections(transport: str) -> None:
    if transport in ("loopback", "threads"):
        _boundary_values(None, transport)
    else:
        run_ranks(_boundary_values, 3, transport)


def _loss_everywhere(rank: int) -> tuple[float, float]:
    inputs, targets = _batch(8)
    with _pipeline(make_mlp(), num_ranks=3) as pipe:
        return pipe.step(inputs, targets).item(), pipe.evaluate(inputs, targets).item()


def test_every_rank_has_the_loss() -> None:
    answers = run_ranks(_loss_everywhere, 3)
    inputs, targets = _batch(8)
    expected = mse(make_mlp()(inputs), targets)
    assert len(set(answers)) == 1
    torch.testing.assert_close(torch.tensor(answers[0]), torch.stack([expected, expected]))


def _data_parallel(schedule: Schedule, copies: int) -> Schedule:
    """A schedule of one chunk a rank with every stage `copies` times, each for its share of the micro-batches."""
    orders = [
        tuple(a._replace(microbatch=a.microbatch * copies + copy) for a in order)
        for order in schedule.orders
        for copy in range(copies)
    ]
    return Schedule(
        name=f"{schedule.name}-x{copies}",
        num_microbatches=schedule.num_microbatches * copies,
        placement=Placement.replicated([copies] * schedule.num_stages),
        orders=tuple(orders),
    )


SPLIT = ["zb-h1", "zb-h2", "zb-auto"]


@pytest.mark.parametrize(("name", "transport"), in_turn(SPLIT, ["loopback", "threads"]))
def test_split_backward_with_data_parallel_replicas_reduces_gradients(name: str, transport: str) -> None:
    schedule = _data_parallel(pl.schedules.build(name, num_ranks=2, num_microbatches=3), 2)
    assert schedule.split_backwards
    inputs, targets = (tensor.double() for tensor in _batch(7))
    reference, model = make_mlp(dtype=torch.float64), make_mlp(dtype=torch.float64)
    with pl.Pipeline(model, schedule, loss_fn=mse, transport=transport) as pipe:
        for _ in range(2):
            accumulate(reference, mse, inputs, targets, 6)
            pipe.step(inputs, targets)
        expected = dict(reference.named_parameters())
        copies: dict[str, list[torch.Tensor]] = {}
        for parameter_name, parameter in pipe.named_parameters():
            copies.setdefault(parameter_name, []).append(parameter.grad)
        for parameter_name, gradients in copies.items():
            assert torch.equal(*gradients)
            torch.testing.assert_close(gradients[0], expected[parameter_name].grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "v-min", "dualpipev"])
def test_split_backward_recomputes_a_checkpointed_block_once(name: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=5)
    assert schedule.split_backwards
    model = make_gpt()
    checkpoint_blocks(model)
    with pl.Pipeline(model, schedule, loss_fn=language_loss) as pipe:
        pipe.step(*tokens(5))
    blocks = [module for module in model.modules() if isinstance(module, Checkpointed)]
    assert [block.calls for block in blocks] == [2 * 5] * 4  # a forward and a recomputation for each micro-batch


class _Watches(nn.Module):
    """Two linear layers that count, whenever they run, the bytes of all tensors around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.held: list[int] = []

    def forward(self, x):
        gc.collect()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors() if not t.is_sparse}
        self.held.append(sum(storages.values()))
        return self.down(torch.nn.functional.gelu(self.up(x)))


def _tensors() -> list[torch.Tensor]:
    return [o for o in gc.get_objects() if type(o) is torch.Tensor]


@pytest.mark.usefixtures("new_objects_alone")
def test_between_i_and_w_only_what_w_needs_is_held() -> None:
    """W of all micro-batches at the end; looked at by each forward, between the I of two micro-batches."""
    m, width, samples = 4, 8, 16
    first, last = nn.Identity(), _Watches(width)
    order_first = tuple(Action(0, op, b) for op in (Op.F, Op.B) for b in range(m))
    order_last = tuple(Action(1, op, b) for b in range(m) for op in (Op.F, Op.I)) + tuple(
        Action(1, Op.W, b) for b in range(m)
    )
    schedule = Schedule(
        name="late-w", num_microbatches=m, placement=Placement.loop(2), orders=(order_first, order_last)
    )
    stages = [nn.Sequential(nn.Linear(width, width), first), last]
    with pl.Pipeline(stages, schedule, loss_fn=mse) as pipe:
        batch = torch.randn(m * samples, width)
        for _ in range(2):
            pipe.step(batch, batch)
    thin, wide = samples * width * 4, samples * 2 * width * 4
    # For W: gelu's result and the gradients of both layers' results (x was there before). Of the rest of the step: the
    # gradient of x, which waits for the first rank, and the loss. What gelu had saved, another `wide`, is gone.
    growth = [b - a for a, b in zip(last.held[m:], last.held[m + 1 :], strict=False)]
    assert growth == [(wide + wide + thin) + thin + 4] * (m - 1)


def test_adjacent_halves_run_as_one_backward() -> None:
    orders = ((Action(0, Op.F, 0), Action(0, Op.I, 0), Action(0, Op.W, 0)),)
    schedule = Schedule(name="halves", num_microbatches=1, placement=Placement.loop(1), orders=orders)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=mse) as pipe:
        pipe.step(*_batch())
        ((_, rows),) = pipe.records
    assert [action.op for action, _, _ in rows] == [Op.F, Op.B]


@pytest.mark.parametrize("name", pl.schedules.FAMILIES)
def test_every_lowered_schedule_is_checked_simulated_and_drawn_whole(name: str, capsys) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    program = lower(schedule)
    pl.check(program)
    timeline = pl.simulate(program, pl.Costs.uniform(forward=1.0, backward=2.0))
    drawn = [[span.action for span in row] for row in timeline.spans]
    assert drawn == [list(order) for order in program.orders]
    assert Action(schedule.num_stages - 1, Op.F, 0) in set().union(*drawn)
    print_timeline(timeline)
    assert "rank 1" in capsys.readouterr().out
