"""What users get wrong beside their stages: optimizers, options, batches, callbacks. Each is told in one line."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import CallerError, InputError, PeerLost, RunError
from pipeloom.schedules import pipedream
from tests.cpu.ranks import run_ranks
from tests.cpu.stream_reference import Rule
from tests.cpu.test_streams import make_batches, make_schedule, make_stages

mse = nn.functional.mse_loss


def make_pipe(num_stages: int = 3) -> pl.Pipeline:
    return pl.Pipeline(make_stages(num_stages), pipedream(num_ranks=num_stages, num_microbatches=8), loss_fn=mse)


def sgd(pipe: pl.Pipeline) -> torch.optim.SGD:
    return torch.optim.SGD(pipe.parameters(), lr=0.05)


class Counts(torch.optim.Optimizer):
    """Its rate falls with a count that it keeps for the group, as schedule-free optimizers do."""

    def __init__(self, parameters, count) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": count})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / (1 + group["count"])))
            group["count"] += 1


@pytest.mark.parametrize("count", [0, torch.zeros(())])
def test_an_optimizer_that_counts_in_its_groups_has_one_stage(count) -> None:
    with make_pipe() as pipe:
        stream = pl.Stream(pipe, Counts(pipe.parameters(), count))
        with pytest.raises(RunError, match=r"Counts writes count into its parameter groups, .* for 3 stages"):
            stream.run(make_batches(8))
    with make_pipe(1) as pipe:
        optimizer = Counts(pipe.parameters(), 0)
        pl.Stream(pipe, optimizer).run(make_batches(8))
        assert optimizer.param_groups[0]["count"] == 8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"discount": "pipemare", "discount_updates": -5}, "discount_updates=-5: must be an integer >= 1"),
        ({"discount": "pipemare", "discount_updates": 2.5}, "discount_updates=2.5"),
        ({"discount": "pipemare", "discount_updates": "a"}, "discount_updates='a'"),
        ({"learning_rate": 0.1}, "learning_rate=0.1: .* Pass a function"),
        ({"on_update": 3}, "on_update=3: .* Pass a function"),
        ({"max_norm": "1"}, "max_norm='1'"),
        ({"max_norm": None}, "max_norm=None"),
        ({"max_norm": True}, "max_norm=True"),
        ({"num_batches": -1}, "num_batches=-1"),
        ({"num_batches": 2.5}, "num_batches=2.5: must be an integer"),
    ],
)
def test_options_are_checked_when_a_stream_is_made(options, text: str) -> None:
    with make_pipe() as pipe, pytest.raises(InputError, match=text):
        pl.Stream(pipe, sgd(pipe), **options)


def test_a_stream_goes_on_from_where_one_can_have_drained() -> None:
    schedule = make_schedule(Rule("stash", (2, 3)), 12)
    with pl.Pipeline(make_stages(2), schedule, loss_fn=mse) as pipe:
        text = "num_batches=9: with replicas 2,3 all stages have updated after every 6 .* Use a multiple of 6"
        with pytest.raises(InputError, match=text):
            pl.Stream(pipe, sgd(pipe), num_batches=9)
        stream = pl.Stream(pipe, sgd(pipe), num_batches=12)
        with pytest.raises(InputError, match=text):
            stream.num_batches = 9
        assert [update.batch for update in stream.run(make_batches(6))] == list(range(12, 18))


class NoRate(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


def test_optimizers_that_no_stream_can_step() -> None:
    with make_pipe() as pipe:
        for make, text in (
            (torch.optim.LBFGS, r"LBFGS.step\(\) needs closure"),
            (torch.optim.SparseAdam, "SparseAdam takes sparse gradients"),
            (list, "optimizer is a list"),
        ):
            with pytest.raises(InputError, match=text):
                pl.Stream(pipe, make(list(pipe.parameters())))
        with pytest.raises(InputError, match="NoRate has parameter groups without 'lr'"):
            pl.Stream(pipe, NoRate(pipe.parameters()), discount="inverse")
        pl.Stream(pipe, NoRate(pipe.parameters())).run(make_batches(8))
        optimizer = sgd(pipe)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps its step
        stream = pl.Stream(pipe, optimizer)
        stream.run(make_batches(8))
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(InputError, match="parameters that are not the pipeline's"):
            stream.run(make_batches(8))


WRONG_RATES = [None, math.nan, -1.0, "0.1", [0.1, 0.2], [], torch.ones(2), lambda: 0]


@pytest.mark.parametrize("wrong", WRONG_RATES)
def test_wrong_rates_change_nothing(wrong) -> None:
    """At the first batch before anything runs; later at the update that would have it."""
    with make_pipe() as pipe:
        before = [p.clone() for p in pipe.parameters()]
        with pytest.raises(InputError, match=r"^learning_rate"):
            pl.Stream(pipe, sgd(pipe), learning_rate=lambda batch: wrong).run(make_batches(8))
        assert all(torch.equal(p, old) for p, old in zip(pipe.parameters(), before, strict=True))
        pl.Stream(pipe, sgd(pipe), learning_rate=lambda batch: torch.tensor(0.1)).run(make_batches(8))
        optimizer = sgd(pipe)
        stream = pl.Stream(pipe, optimizer, learning_rate=lambda batch: 0.1 if batch < 4 else wrong)
        with pytest.raises(CallerError, match=r"^learning_rate"):
            stream.run(make_batches(8))
        assert stream.num_updates[2] == {2: 4}
        assert all(p.isfinite().all() for p in pipe.parameters())
        assert optimizer.param_groups[0]["lr"] == 0.05


def test_a_rate_that_raises_is_named() -> None:
    with make_pipe() as pipe:
        stream = pl.Stream(pipe, sgd(pipe), learning_rate=lambda batch: 1 / (3 - batch))
        with pytest.raises(CallerError, match=r"^learning_rate\(3\) raised ZeroDivisionError"):
            stream.run(make_batches(8))


def test_numbers_of_batches_are_whole_and_there() -> None:
    with make_pipe() as pipe:
        stream, batches = pl.Stream(pipe, sgd(pipe)), make_batches(8)
        unknown = torch.utils.data.DataLoader(Endless(), batch_size=4)  # has __len__, which raises
        for arguments, text in (
            ((batches, 2.0), "num_batches=2.0"),
            ((batches, "3"), "num_batches='3'"),
            ((batches, True), "num_batches=True"),
            ((batches[:3], 5), "num_batches=5: `batches` has only 3"),
            ((unknown,), "without a length"),
        ):
            with pytest.raises(InputError, match=text):
                stream.run(*arguments)
        stream.run(unknown, 4)
        stream.run(batches, 3)
        assert stream.num_batches == 7


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.ones(8).double(), torch.ones(8).double()


def faulty(fault: str) -> Iterator[object]:
    yield from make_batches(3)
    if fault == "raises":
        raise OSError("the disk\nis gone")
    if fault != "ends":
        one = torch.ones(1, 8).double()
        yield {"pair": one, "triple": (one, one, one), "none": (None, None), "short": (one[:0], one[:0])}[fault]
        yield from make_batches(8)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "item 3 raised OSError: the disk is gone"),
        ("ends", "item 3 is missing, they ended after 3 of 8"),
        ("pair", "item 3 is a Tensor"),
        ("triple", "item 3 is a tuple of 3"),
        ("none", "item 3: inputs=None"),
        ("short", "item 3: .*samples"),
    ],
)
def test_faults_of_batches_are_no_faults_of_a_stage(fault: str, text: str, transport: str) -> None:
    schedule = pipedream(num_ranks=3, num_microbatches=8)
    with pl.Pipeline(make_stages(3), schedule, loss_fn=mse, transport=transport) as pipe:
        stream = pl.Stream(pipe, sgd(pipe))
        with pytest.raises(CallerError, match=f"^batches: {text}") as caught:
            stream.run(faulty(fault), 8)
        assert isinstance(caught.value.__cause__, OSError) or fault != "raises"
        assert "\n" not in str(caught.value)
        assert stream.num_batches == 0
        made = {stage: n for of_rank in stream.num_updates.values() for stage, n in of_rank.items()}
        assert sorted(made) == [0, 1, 2]
        assert max(made.values()) <= 3
        with pytest.raises(RunError, match="cannot run any more"):
            stream.run(make_batches(8))


def test_on_update_that_raises_is_named() -> None:
    def told(batch: int, loss: float) -> None:
        if batch == 2:
            raise KeyError("metrics")

    with make_pipe() as pipe:
        stream = pl.Stream(pipe, sgd(pipe), on_update=told)
        with pytest.raises(CallerError, match=r"^on_update\(2, .*\) raised KeyError: 'metrics'") as caught:
            stream.run(make_batches(8))
        assert isinstance(caught.value.__cause__, KeyError)


def _replicas_with_other_optimizers(rank: int) -> None:
    """Ranks 0 and 1 hold stage 0; rank 2 holds stage 1 and has another optimizer with another rate all along."""
    odd, adam = rank == 1, torch.optim.Adam
    with pl.Pipeline(make_stages(2), make_schedule(Rule("stash", (2, 1)), 6), loss_fn=mse) as pipe:
        parameters = list(pipe.parameters())

        def run(optimizer: torch.optim.Optimizer, rate: float | None = None) -> None:
            if rank == 2:
                optimizer = torch.optim.SGD(parameters, lr=0.5)
            asked = None if rate is None or rank == 2 else lambda batch: rate + batch
            pl.Stream(pipe, optimizer, learning_rate=asked).run(make_batches(6))

        for optimizer, rate, text in (
            (adam(parameters, lr=0.2 if odd else 0.1), None, "lr of group 0 0.1 on rank 0 and 0.2 on rank 1"),
            (adam(parameters, lr=0.2 if odd else 0.1), 0.3 if odd else 0.4, "lr of group 0 0.4 on rank 0 and 0.3"),
            (adam(parameters), 0.001 if odd else None, "learning_rate of its groups on rank 0 and from a function"),
            (adam(parameters, betas=(0.8, 0.99 if odd else 0.9)), None, r"betas of group 0 \(0.8, 0.9\) on rank 0 and"),
            (adam(parameters, amsgrad=odd), None, "amsgrad of group 0 False on rank 0 and True on rank 1"),
            ((torch.optim.AdamW if odd else adam)(parameters), None, "optimizer Adam on rank 0 and AdamW on rank 1"),
            (adam(parameters[odd:]), None, r"parameters by group \[\[0, 1, 2, 3\]\] on rank 0 and \[\[1, 2, 3\]\] on"),
        ):
            with pytest.raises(InputError, match=f"^replicas of stage 0 have {text}"):
                run(optimizer, rate)
        run(adam(parameters, lr=torch.tensor(0.5) if odd else 0.5, eps=1 if odd else 1.0), 0.125)


def test_replicas_that_would_update_in_other_ways_are_told() -> None:
    run_ranks(_replicas_with_other_optimizers, 3)
    with pl.Pipeline(make_stages(1), make_schedule(Rule("stash", (2,)), 6), loss_fn=mse) as pipe:
        first, second = (list(stage.parameters()) for stage in pipe.modules())
        optimizer = torch.optim.SGD([{"params": first}, {"params": second, "lr": 0.2}], lr=0.1)
        with pytest.raises(InputError, match=r"lr of group 0 0\.1 on rank 0 and 0\.2 on rank 1"):
            pl.Stream(pipe, optimizer).run(make_batches(6))


def _replicas_with_rates_that_part(rank: int) -> None:
    """Ranks 0 and 1 hold stage 0, and are of one mind about the first batches alone."""
    with pl.Pipeline(make_stages(2), make_schedule(Rule("stash", (2, 1)), 6), loss_fn=mse) as pipe:
        groups = [{"params": [p]} for p in pipe.parameters()]
        stream = pl.Stream(
            pipe,
            torch.optim.SGD(groups, lr=0.1),
            learning_rate=lambda batch: [0.1] * (len(groups) - 1) + [0.25 if rank == 1 and batch > 2 else 0.1],
        )
        with pytest.raises((CallerError, PeerLost)) as caught:
            stream.run(make_batches(6))
    if rank < 2:  # the other stage's rank loses them
        assert type(caught.value) is CallerError
        assert str(caught.value) == (
            f"replicas of stage 0 have learning rate {0.25 if rank else 0.1} on rank {rank} and "
            f"{0.1 if rank else 0.25} on rank {1 - rank} for parameter '0.1.0.bias' in update 1: replicas must make "
            "the same updates. Give the same learning_rate on each."
        )


def test_replicas_that_come_to_update_at_other_rates_are_told() -> None:
    run_ranks(_replicas_with_rates_that_part, 3)


def with_nothing_to_train(which: int) -> list[nn.Module]:
    """The first has no parameters, others frozen ones."""
    stages = make_stages(3)
    stages[which] = stages[which].requires_grad_(False) if which else nn.Tanh()
    return stages


def _no_optimizer(rank: int) -> None:
    schedule, batches = make_schedule(Rule("stash", (1, 1, 1)), 8), make_batches(8)
    for which in range(3):
        with pl.Pipeline(with_nothing_to_train(which), schedule, loss_fn=mse, transport="loopback") as pipe:
            expected = pl.Stream(pipe, sgd(pipe), max_norm=1.0).run(batches)
        with pl.Pipeline(with_nothing_to_train(which), schedule, loss_fn=mse) as pipe:
            optimizer = None if rank == which else torch.optim.SGD(pipe.parameters(), lr=0.5)
            stream = pl.Stream(pipe, optimizer, max_norm=1.0, learning_rate=lambda batch: 0.05)
            assert stream.run(batches) == expected
            if rank != which:
                with pytest.raises(InputError, match=r"optimizer=None: parameter '.*' of this process requires a"):
                    pl.Stream(pipe, None)


def test_a_process_without_anything_to_train_has_no_optimizer() -> None:
    run_ranks(_no_optimizer, 3)
