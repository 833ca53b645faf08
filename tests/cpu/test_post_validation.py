"""The optimizer step without a barrier: weights, states and norms are those behind a barrier, to the last bit."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.errors import InputError, StageError
from pipeloom.ir import Action, Op, Placement
from pipeloom.passes import lower, repeat_steps, warm_up_lengths
from pipeloom.training.post_validation.rank_update import RankUpdate
from tests.cpu.pairwise import of_grid
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, make_mlp, tokens
from tests.cpu.train_runs import launched

mse = nn.functional.mse_loss
SMALL = 4e-4
# What the gradients of each step are multiplied by, on all ranks but the last and on the last. Clipping is needed where
# either is 1; where the last alone knows, the others have to take their update back.
FACTORS = [
    (SMALL, 1), (SMALL, SMALL), (1, 1), (SMALL, SMALL), (SMALL, SMALL), (SMALL, math.nan),
    (SMALL, 1), (math.nan, math.nan), (SMALL, SMALL), (SMALL, math.inf), (1, SMALL), (SMALL, SMALL),
]  # fmt: skip
NUM_STEPS = len(FACTORS)
NUM_WRONG_BEFORE_LAST = 4  # the last rank alone knows
NUM_WRONG = 6  # somebody does not do the right thing at once


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1, fused=True)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


def _groups(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3, "amsgrad": True}, {"params": vectors, "lr": 0.01}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05, weight_decay=0.0)


OPTIMIZERS = {"adamw": _adamw, "sgd": _sgd, "groups": _groups}


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        yield tuple(torch.randn(8, 8, generator=generator) for _ in range(2))


def _disturb(pipe: pl.Pipeline, clock: list[int]) -> None:
    """Multiply gradients by the factors of step ``clock[0]``."""

    def hook(parameter: nn.Parameter, last: bool) -> None:
        parameter.register_hook(lambda gradient: gradient * FACTORS[clock[0]][last])

    for rank in pipe.executor.local_ranks:
        for parameter in pipe.state.rank_parameters(rank):
            hook(parameter, rank == pipe.schedule.num_ranks - 1)


class _Scaled(nn.Module):
    """A loss whose gradients stay large however long it is trained."""

    def forward(self, output: Tensor, targets: Tensor) -> Tensor:
        return (output * targets).mean() * 400


def _train(
    model: nn.Module,
    schedule: pl.Schedule,
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    batches: list[tuple[Tensor, Tensor]],
    *,
    kind: type[Any],
    transport: str,
    loss_fn: Any = None,
    max_norm: float = 0.5,
    settle_after: tuple[int, ...] = (),
) -> tuple[list[Any], Any]:
    """Everything that must agree to the last bit, and the step object."""
    with pl.Pipeline(model, schedule, loss_fn=loss_fn or _Scaled(), transport=transport) as pipe:
        optimizer = make_optimizer(pipe.parameters())
        stepper = kind(pipe, optimizer, max_norm=max_norm)
        updates: list[pl.Update] = []
        clock = [0]
        _disturb(pipe, clock)
        for number, (inputs, targets) in enumerate(batches):
            clock[0] = number
            for group in optimizer.param_groups:  # a schedule: an update that is done again must know its own
                group["lr"] *= 0.9
            updates += stepper.step(inputs, targets, lambda: torch.tensor([2.5]))
            if number in settle_after:
                updates += stepper.settle()
                pipe.evaluate(inputs, targets)
        updates += stepper.settle()
        states = [optimizer.state.get(p, {}) for p in pipe.parameters()]
        facts = [
            [(float(u.loss), float(u.grad_norm), u.applied, u.numbers.tolist()) for u in updates],
            {name: (p.detach().clone(), p.grad) for name, p in pipe.named_parameters()},
            [{key: torch.as_tensor(value).clone() for key, value in state.items()} for state in states],
            {f"{i}.{name}": b.clone() for i, m in enumerate(pipe.modules()) for name, b in m.named_buffers()},
        ]
        return facts, stepper


def _assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert torch.equal(one.nan_to_num(nan=7e7), other.nan_to_num(nan=7e7))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            _assert_same(a, b)
    else:
        assert one == other or (one != one and other != other), (one, other)


def _compare(transport: str, name: str, optimizer: str, num_ranks: int = 3) -> tuple[dict[int, int], int]:
    schedule = pl.schedules.build(name, num_ranks=num_ranks, num_microbatches=2 * num_ranks)
    make_model, batches = lambda: make_mlp(depth=2 * schedule.num_stages), list(_batches())
    arguments = (schedule, OPTIMIZERS[optimizer], batches)
    expected, _ = _train(make_model(), *arguments, kind=pl.BarrierStep, transport=transport, settle_after=(5, 6))
    found, stepper = _train(
        make_model(), *arguments, kind=pl.PostValidatedStep, transport=transport, settle_after=(5, 6)
    )
    _assert_same(found, expected)
    clipped = [applied and norm > 0.5 for _, norm, applied, _ in expected[0]]
    assert clipped == [early * late == early * late and 1 in (early, late) for early, late in FACTORS]
    assert [applied for *_, applied, _ in expected[0]] == [math.isfinite(early * late) for early, late in FACTORS]
    return stepper.num_rollbacks, stepper.num_repeats


@pytest.mark.parametrize(
    ("name", "transport", "optimizer"),
    of_grid(("zb-h1", "zb-h2", "zb-v", "interleaved"), ("loopback", "threads"), OPTIMIZERS, apart={(0, 2)}),
)
def test_one_process_trains_as_with_a_barrier(name: str, transport: str, optimizer: str) -> None:
    rollbacks, repeats = _compare(transport, name, optimizer)
    assert rollbacks == {0: NUM_WRONG_BEFORE_LAST, 1: NUM_WRONG_BEFORE_LAST, 2: 0}
    assert repeats == NUM_WRONG


def _in_processes(rank: int, transport: str, name: str, optimizer: str) -> tuple[dict[int, int], int]:
    return _compare(transport, name, optimizer, num_ranks=4)


@pytest.mark.parametrize(
    ("name", "optimizer", "transport"),
    [
        ("zb-h2", "adamw", "shared-memory"),
        ("zb-v", "groups", "torch"),
        ("interleaved", "sgd", "shared-memory"),
        pytest.param("interleaved", "sgd", "torch", marks=pytest.mark.whole_grid),
        pytest.param("zb-h2", "adamw", "torch", marks=pytest.mark.whole_grid),
        pytest.param("zb-v", "groups", "shared-memory", marks=pytest.mark.whole_grid),
    ],
)
def test_processes_train_as_with_a_barrier(transport: str, name: str, optimizer: str) -> None:
    """With interleaved, the cancellation of rank 3 reaches rank 0 while rank 1 waits for rank 0."""
    answers = run_ranks(_in_processes, 4, transport, name, optimizer)
    rollbacks = [*({rank: NUM_WRONG_BEFORE_LAST} for rank in range(3)), {3: 0}]
    assert answers == [(own, NUM_WRONG) for own in rollbacks]


def _language_loss(output: Tensor, targets: Tensor) -> Tensor:
    return language_loss(output, targets) * 20


def test_repeated_slices_of_the_last_stage_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of slices add up. Rank 0 computes those of micro-batch 0 before the update is validated."""
    monkeypatch.setattr(RankUpdate, "ready", lambda update: update._behind is None)
    orders = [
        [Action(0, op, rank, piece) for op, pieces in ((Op.F, (0, 1)), (Op.B, (1, 0))) for piece in pieces]
        for rank in range(2)
    ]
    schedule = pl.Schedule(
        name="slices", num_microbatches=2, num_slices=2, placement=Placement(replicas=((0, 1),)), orders=orders
    )
    assert warm_up_lengths(lower(schedule))[0] == 2
    batches = [tokens(batch=4, seed=seed) for seed in range(NUM_STEPS)]
    arguments = (schedule, OPTIMIZERS["adamw"], batches)
    facts = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        found, stepper = _train(make_gpt(), *arguments, kind=kind, transport="threads", loss_fn=_language_loss)
        facts.append(found)
    _assert_same(facts[1], facts[0])
    assert stepper.num_repeats > 0


# --- replicas, tied weights, random numbers, buffers ------------------------------------------------------------------


class _Block(nn.Module):
    """What forwards change beside the graph: running means and random numbers, and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(0.9) + 0.1 * random.random()
        return x + self.dropout(self.norm(self.linear(x)))


def _stateful(rank: int, transport: str) -> int:
    batches = [(torch.cat([x, x]), torch.cat([y, y])) for x, y in _batches()]  # a norm needs two samples
    facts = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        torch.manual_seed(rank)
        random.seed(rank)
        model = nn.Sequential(*(_Block() for _ in range(3)))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
        schedule = pl.schedules.zb_h2(num_ranks=3, num_microbatches=8)
        data = copy.deepcopy(batches)
        found, stepper = _train(model, schedule, _adamw, data, kind=kind, transport=transport)
        facts.append([*found, torch.get_rng_state()])
    _assert_same(facts[1], facts[0])
    return stepper.num_repeats


@pytest.mark.parametrize("transport", ["shared-memory", "torch"])
def test_buffers_and_random_states_go_back_too(transport: str) -> None:
    assert min(run_ranks(_stateful, 3, transport)) > 0


@pytest.mark.parametrize(
    ("name", "transport"),
    [
        ("dualpipe", "loopback"),
        ("chimera", "threads"),
        ("dualpipev", "loopback"),
        ("dualpipev", "threads"),
        pytest.param("dualpipe", "threads", marks=pytest.mark.whole_grid),
        pytest.param("chimera", "loopback", marks=pytest.mark.whole_grid),
    ],
)
def test_replicas_count_once_and_stay_equal(name: str, transport: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=4, num_microbatches=8)
    facts = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        model = make_mlp(depth=schedule.num_stages)
        found, stepper = _train(model, schedule, _groups, list(_batches()), kind=kind, transport=transport)
        facts.append(found)
    _assert_same(facts[1], facts[0])
    assert stepper.num_repeats > 0


def _tied(rank: int, transport: str) -> int:
    schedule = pl.schedules.zb_v(num_ranks=2, num_microbatches=4)
    batches = [tokens(4, seed=seed) for seed in range(10)]
    facts = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        found, stepper = _train(
            make_gpt(tied=True),
            schedule,
            _adamw,
            batches,
            kind=kind,
            transport=transport,
            loss_fn=language_loss,
            max_norm=0.85,
        )
        facts.append(found)
    _assert_same(facts[1], facts[0])
    return stepper.num_repeats


@pytest.mark.parametrize("transport", ["auto", "torch"])
def test_tied_weights(transport: str) -> None:
    repeats = run_ranks(_tied, 2, transport)
    assert repeats[0] == repeats[1] > 0


# --- what users may do ------------------------------------------------------------------------------------------------


class _Picky(nn.Module):
    """Refuses what a step that should have been clipped makes of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.linear.weight.abs().max() > 100:
            raise ValueError("the weights exploded")
        return self.linear(x)


def _picky(rank: int, raises: bool) -> int:
    torch.manual_seed(0)
    batch = torch.randn(8, 8), torch.randn(8, 8) * 1e4
    max_norm = math.inf if raises else 0.5
    schedule = pl.schedules.zb_h2(num_ranks=3, num_microbatches=8)
    with pl.Pipeline([_Picky() for _ in range(3)], schedule, loss_fn=_Scaled()) as pipe:
        stepper = pl.PostValidatedStep(pipe, _sgd(pipe.parameters()), max_norm=max_norm)
        stepper.step(*batch)
        if raises:
            with pytest.raises((StageError, pl.errors.PeerLost)) as caught:
                stepper.step(*batch)
            return isinstance(caught.value, StageError)
        stepper.step(*batch)
        stepper.settle()
        return stepper.num_repeats


def test_an_error_counts_only_if_the_parameters_stand() -> None:
    assert all(run_ranks(_picky, 3, False))
    assert any(run_ranks(_picky, 3, True))


def test_gradients_of_several_batches_and_evaluation_between() -> None:
    facts = []
    schedule = pl.schedules.zb_h1(num_ranks=2, num_microbatches=4)
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        with pl.Pipeline(make_mlp(), schedule, loss_fn=_Scaled(), transport="threads") as pipe:
            stepper = kind(pipe, _adamw(pipe.parameters()), max_norm=0.5)
            found: list[Any] = []
            for inputs, targets in list(_batches())[:7]:
                found.append(pipe.step(inputs, targets))
                found.append(pipe.evaluate(inputs, targets))
                found += [update.grad_norm for update in stepper.step(inputs, targets)]
                found.append(pipe.forward(inputs))
            found += [update.grad_norm for update in stepper.settle()]
            facts.append(found)
    norms = [[f for f in found if f.shape == ()] for found in facts]
    assert sorted(map(float, norms[0])) == sorted(map(float, norms[1]))
    outputs = [[f for f in found if f.shape != ()] for found in facts]
    _assert_same(*outputs)


def test_an_optimizer_that_counts_in_its_groups_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1

    schedule = pl.schedules.zb_h1(num_ranks=2, num_microbatches=2)
    pipe = pl.Pipeline(make_mlp(), schedule, loss_fn=mse, transport="loopback")
    stepper = pl.PostValidatedStep(pipe, Counting(pipe.parameters(), lr=0.1))
    with pytest.raises(InputError, match="Counting writes count into its parameter groups"):
        stepper.step(torch.randn(4, 8), torch.randn(4, 8))


def test_parameters_of_others_are_refused() -> None:
    schedule = pl.schedules.zb_h1(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=mse, transport="loopback") as pipe:
        with pytest.raises(InputError, match="not the pipeline's"):
            pl.PostValidatedStep(pipe, _sgd(nn.Linear(2, 2).parameters()))
        with pytest.raises(InputError, match="max_norm=0"):
            pl.BarrierStep(pipe, _sgd(pipe.parameters()), max_norm=0)


def test_leaving_the_pipeline_settles() -> None:
    schedule = pl.schedules.zb_h1(num_ranks=2, num_microbatches=4)
    weights = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        with pl.Pipeline(make_mlp(), schedule, loss_fn=_Scaled(), transport="threads") as pipe:
            stepper = kind(pipe, _adamw(pipe.parameters()), max_norm=0.5)
            stepper.step(*next(_batches()))
        weights.append([p.detach() for p in pipe.parameters()])
        assert [u.applied for u in stepper.settle()] == [True] * (kind is pl.PostValidatedStep)
    _assert_same(*weights)


# --- pipeloom train ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Trains a tiny model; returns the output directory."""
    directory = tmp_path_factory.mktemp("post-validation")
    (directory / "text").mkdir()
    for number in range(6):
        (directory / "text" / f"{number}.txt").write_text("the loom weaves micro-batches " * (40 + number))

    def train(name: str, *more: str, code: int = 0) -> Path:
        options = {
            "data.path": directory / "text", "data.validation_fraction": 0.4, "steps": 12, "save_steps": 4,
            "eval_steps": 5, "eval_batches": 1, "sample_tokens": 0, "model.layers": 3, "model.width": 16,
            "model.heads": 2, "model.sequence_length": 16, "batch.size": 10,
            "batch.microbatches": 5, "optimizer.warmup_steps": 1, "optimizer.clip_norm": 1.15, "schedule": "zb-h2",
            "parallel.pipeline": 3, "save_total_limit": "null", "output_dir": directory / name,
        }  # fmt: skip
        words = ["train", *(f"--{key}={value}" for key, value in options.items()), *more]
        if "--local" in more:
            assert main(words) == code
        else:
            done = launched(words)
            assert done.returncode == code, done.stderr
        return directory / name

    return train


def _story(output_dir: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "lr", "eval_loss")) for row in rows]


def _saved(checkpoint: Path) -> dict[str, Tensor]:
    """Model and optimizer; the random states are each process's own."""
    files = [file for kind in ("model", "optimizer") for file in checkpoint.glob(f"{kind}*.safetensors")]
    return {f"{file.name[:5]} {key}": tensor for file in files for key, tensor in load_file(file).items()}


def test_train_gives_the_same_run_with_and_without_a_barrier(run: Callable[..., Path]) -> None:
    barrier, free = run("barrier", "--local"), run("free", "--optimizer.barrier=false")
    norms = [row[2] for row in _story(barrier) if row[2] is not None]
    assert 2 <= sum(norm > 1.15 for norm in norms) <= len(norms) - 2, norms
    assert _story(free) == _story(barrier)
    for name in ("checkpoint-4", "checkpoint-12"):
        _assert_same(_saved(free / name), _saved(barrier / name))
    more = ["--local", "--optimizer.barrier=false", f"--resume_from_checkpoint={free / 'checkpoint-4'}"]
    resumed = run("resumed", *more)
    assert _story(resumed) == [row for row in _story(barrier) if row[0] > 4]
    _assert_same(_saved(resumed / "checkpoint-12"), _saved(barrier / "checkpoint-12"))


def test_train_ends_alike_at_numbers_that_are_not_finite(run: Callable[..., Path]) -> None:
    more = ["--optimizer.learning_rate=1e30", "--optimizer.clip_norm=0", "--eval_steps=0", "--save_steps=0", "--local"]
    free, barrier = (run(f"endless-{b}", *more, f"--optimizer.barrier={b}", code=1) for b in ("false", "true"))
    assert _story(free) == _story(barrier)
    assert None in _story(free)[-1][1:3]


# --- the passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(pl.schedules.FAMILIES))
def test_warm_ups_are_forwards_and_the_first_backward_is_not_held_back(name: str) -> None:
    """Nothing in a warm-up needs anything else, and what is behind it starts with a backward or waits for one."""
    schedule = pl.schedules.build(name, num_ranks=4, num_microbatches=8)
    program = lower(schedule)
    lengths = warm_up_lengths(program)
    warm = {action for order, length in zip(program.orders, lengths, strict=True) for action in order[:length]}
    assert all(action.op in ("F", "SEND_F", "RECV_F") for action in warm)
    for action in warm:
        assert warm.issuperset(pl.ir.dependencies(action, program))
    assert any(order[length].op in ("B", "I") for order, length in zip(program.orders, lengths, strict=True))


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "zb-v", "dualpipe"])
def test_steps_in_a_row_are_a_legal_schedule(name: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=4, num_microbatches=8)
    steps = repeat_steps(schedule, 3)
    pl.check(steps)
    costs = pl.Costs.uniform(forward=1.0, backward=2.0)
    one, three = (pl.simulate(each, costs) for each in (schedule, steps))
    assert one.span_seconds - 1e-9 <= (three.makespan - one.makespan) / 2 <= one.makespan + 1e-9
