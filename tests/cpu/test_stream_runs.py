"""What a stream does beside its numbers: memory, state that has no versions, errors, refusals."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost, RunError, StageError
from pipeloom.ir import WeightPolicy
from pipeloom.schedules import pipedream
from tests.cpu import stream_reference
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import Checkpointed, make_mlp
from tests.cpu.stream_reference import Rule
from tests.cpu.test_streams import OPTIMIZERS, compare, make_batches, make_schedule, make_stages

mse = nn.functional.mse_loss


def run(stages, schedule, batches, optimizer: str = "momentum", **options):
    """A pipeline on loopback that ran a stream, and the stream."""
    pipe = pl.Pipeline(stages, schedule, loss_fn=mse, transport="loopback")
    stream = pl.Stream(pipe, OPTIMIZERS[optimizer](list(pipe.parameters())), **options)
    stream.run(batches)
    return pipe, stream


class Watched(nn.Module):
    """Counts the distinct weights that exist whenever it runs forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.met: list[weakref.ref] = []
        self.most = 0

    def forward(self, x):
        self.met.append(weakref.ref(self.linear.weight))
        self.most = max(self.most, len({id(w) for ref in self.met if (w := ref()) is not None}))
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("weights", ["stash", "vertical", "2bw"])
def test_versions_are_let_go_of(weights: str) -> None:
    """As many exist as predicted, none after the run; the parameters are in their places again."""
    stages = [Watched() for _ in range(4)]
    parameters = [stage.linear.weight for stage in stages]
    schedule = make_schedule(Rule(weights, (1,) * 4, 3 if weights == "2bw" else 1), 24)
    run(stages, schedule, make_batches(24))
    versions = pl.check(schedule).weight_versions
    assert all(stage.most <= count for stage, count in zip(stages, versions, strict=True))
    if weights == "stash":  # others do not meet a version at once
        assert tuple(stage.most for stage in stages) == versions == (4, 3, 2, 1)
    for stage, parameter in zip(stages, parameters, strict=True):
        assert stage.linear.weight is parameter
        assert parameter.grad is None
        assert all(ref() is None for ref in stage.met)


class Sometimes(nn.Module):
    """A frozen matrix, one that nobody uses, and one that is used only where the first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Parameter(torch.eye(8, dtype=torch.float64)) for _ in range(3))
        self.frozen = nn.Parameter(torch.eye(8, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        if bool(x.flatten()[0] > 0):
            x = x @ self.sometimes
        return torch.tanh(x @ self.always @ self.frozen)


def test_parameters_that_do_not_change_share_memory() -> None:
    rule, batches = Rule("stash", (1, 1, 1)), make_batches(30)
    stages = [Sometimes() for _ in range(3)]
    expected = stream_reference.train(stages, rule, batches, mse, OPTIMIZERS["adamw"])
    frozen = [stage.frozen.data_ptr() for stage in stages]
    never = [stage.never.data_ptr() for stage in stages]
    pipe, stream = run(stages, make_schedule(rule, 30), batches, "adamw")
    compare(pipe, expected.parameters)
    assert [stage.frozen.data_ptr() for stage in stages] == frozen
    assert [stage.never.data_ptr() for stage in stages] == never
    matrix = 8 * 8 * 8
    assert stream.peak_weight_versions == {0: 3, 1: 2, 2: 1}
    assert stream.peak_weight_bytes[2] == 3 * matrix
    for rank, versions in ((0, 3), (1, 2)):  # of what always changes, of what sometimes does, of what never does
        assert (versions + 2) * matrix <= stream.peak_weight_bytes[rank] <= (2 * versions + 1) * matrix


class Awkward(nn.Module):
    """Running statistics, dropout, a recurrent layer that keeps references, all under checkpointing; a tied matrix."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(dropout)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.recurrent = nn.GRU(8, 8)

    def forward(self, x):
        hidden, _ = self.recurrent(self.drop(self.norm(self.first(x))))
        return x + self.last(hidden)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_statistics_dropout_and_recomputation(checkpointed: bool) -> None:
    """Buffers change in the order of forwards, masks are those of the forward, also where it is recomputed."""
    torch.manual_seed(1)
    stages = [Awkward(0.5 if k == 1 else 0.0).double() for k in range(3)]
    rule, batches = Rule("stash", (1, 1, 1)), make_batches(12)
    twins = copy.deepcopy(stages)
    torch.manual_seed(2)
    expected = stream_reference.train(twins, rule, batches, mse, OPTIMIZERS["momentum"])
    modules = [Checkpointed(stage) for stage in stages] if checkpointed else stages
    torch.manual_seed(2)
    pipe, _ = run(modules, make_schedule(rule, 12), batches)
    inside = ".inner." if checkpointed else "."
    compare(pipe, {name.replace(".", inside, 1): value for name, value in expected.parameters.items()})
    for stage, twin in zip(stages, twins, strict=True):
        assert stage.last.weight is stage.first.weight
        if not checkpointed:  # which runs a forward again, and the statistics see every batch twice
            assert torch.equal(stage.norm.running_mean, twin.norm.running_mean)
            assert torch.equal(stage.norm.running_var, twin.norm.running_var)


def test_replicas_have_the_buffers_of_the_first_after_a_run() -> None:
    stages = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double() for _ in range(2)]
    twin = copy.deepcopy(stages)
    rule, batches = Rule("stash", (2, 1)), make_batches(8)
    expected = stream_reference.train(copy.deepcopy(stages), rule, batches, mse, OPTIMIZERS["sgd"])
    pipe, _ = run(stages, make_schedule(rule, 8), batches, "sgd")
    compare(pipe, expected.parameters)
    first, second, _ = (
        part for stage in pipe.modules() for part in stage.modules() if isinstance(part, nn.BatchNorm1d)
    )
    assert torch.equal(first.running_mean, second.running_mean)
    assert first.num_batches_tracked == second.num_batches_tracked == 4
    assert not torch.equal(first.running_mean, twin[0][1].running_mean)


def test_hooks_on_parameters_change_gradients() -> None:
    """Half the gradient is, for momentum without weight decay, half the learning rate."""

    def halved(parameters):
        groups = [{"params": parameters[:1], "lr": 0.01}, {"params": parameters[1:]}]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=True)

    rule, batches, stages = Rule("stash", (1, 1)), make_batches(6), make_stages(2)
    expected = stream_reference.train(make_stages(2), rule, batches, mse, halved)
    for stage in stages:
        stage[0][0].weight.register_hook(lambda gradient: gradient / 2)
    pipe, _ = run(stages, make_schedule(rule, 6), batches)
    compare(pipe, expected.parameters)


def test_a_rate_for_each_group() -> None:
    """They are in the order of the groups, and nothing else will do."""
    rule, batches = Rule("stash", (1, 1)), make_batches(6)

    def grouped(rates):
        return lambda parameters: torch.optim.SGD(
            [
                {"params": [p for p in parameters if p.ndim == n], "lr": rate}
                for n, rate in zip((2, 1), rates, strict=True)
            ]
        )

    expected = stream_reference.train(make_stages(2), rule, batches, mse, grouped((0.04, 0.01)))
    with pl.Pipeline(make_stages(2), make_schedule(rule, 6), loss_fn=mse) as pipe:
        optimizer = grouped((0.5, 0.6))(list(pipe.parameters()))
        pl.Stream(pipe, optimizer, learning_rate=lambda batch: [0.04, 0.01]).run(batches)
        compare(pipe, expected.parameters)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.6]
        with pytest.raises(InputError, match="learning_rate returned 3 rates for 2 parameter groups"):
            pl.Stream(pipe, optimizer, learning_rate=lambda batch: (0.1, 0.1, 0.1)).run(batches)


def test_casts_of_weights_are_of_the_version() -> None:
    """Autocast keeps casts of weights until it ends; a run inside it is long, and weights change in it."""
    batches = [(x.float(), y.float()) for x, y in make_batches(8)]
    stages = [stage.float() for stage in make_stages(2)]
    twins = copy.deepcopy(stages)

    class Cast(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    expected = stream_reference.train(
        [Cast(twin) for twin in twins], Rule("stash", (1, 1)), batches, mse, OPTIMIZERS["momentum"]
    )
    with torch.autocast("cpu", torch.bfloat16):
        pipe, _ = run(stages, make_schedule(Rule("stash", (1, 1)), 8), batches)
    compare(pipe, {name.replace("inner.", ""): value for name, value in expected.parameters.items()})


class Counted(list):
    """Batches that know how many of their members exist."""

    def __iter__(self):
        self.alive: list[weakref.ref] = []
        self.most = 0
        for inputs, targets in super().__iter__():
            inputs = inputs.clone()
            self.alive.append(weakref.ref(inputs))
            self.most = max(self.most, sum(ref() is not None for ref in self.alive))
            yield inputs, targets
            del inputs


def test_batches_are_taken_as_they_are_due_and_dropped() -> None:
    batches = Counted(make_batches(40))
    told = []
    _, stream = run(
        make_stages(4), make_schedule(Rule("stash", (1,) * 4), 40), batches, on_update=lambda *row: told.append(row)
    )
    assert batches.most <= 6  # four in flight
    assert [batch for batch, _ in told] == list(range(40))
    assert stream.num_batches == 40


@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (1, 2)])
def test_evaluation_between_runs(replicas: tuple[int, ...]) -> None:
    batches, stages = make_batches(12), make_stages(len(replicas))
    inputs, targets = make_batches(1, samples=7)[0]
    model = nn.Sequential(*stages)
    with pl.Pipeline(stages, make_schedule(Rule("stash", replicas), 12), loss_fn=mse) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        for some in (batches[:6], batches[6:]):
            before = pipe.evaluate(inputs, targets)
            stream.run(some)
            assert pipe.evaluate(inputs, targets) != before
            assert torch.equal(pipe.forward(inputs), model(inputs))
            torch.testing.assert_close(pipe.evaluate(inputs, targets), mse(model(inputs), targets))


def _replicas(rank: int, transport: str) -> None:
    """Two ranks with the last stage tell rank 0; evaluations are of batches that not all replicas take part in."""
    rule, batches = Rule("stash", (1, 2)), make_batches(8)
    expected = stream_reference.train(make_stages(2), rule, batches, mse, OPTIMIZERS["sgd"])
    told: list[tuple[int, float]] = []
    with pl.Pipeline(make_stages(2), make_schedule(rule, 8), loss_fn=mse, transport=transport) as pipe:
        optimizer = OPTIMIZERS["sgd"](list(pipe.parameters()))
        stream = pl.Stream(pipe, optimizer, on_update=lambda *row: told.append(row))
        updates = stream.run(iter(batches) if rank != 0 else batches, num_batches=8)
        assert [update.loss for update in updates] == expected.losses
        assert told == ([(update.batch, update.loss) for update in updates] if rank == 0 else [])
        assert pipe.evaluate(*batches[0]).shape == ()
        output = pipe.forward(batches[0][0])
        assert (output is None) == (rank == 0)


@pytest.mark.parametrize("transport", ["shared-memory", "torch"])
def test_losses_as_they_come_from_replicas(transport: str) -> None:
    run_ranks(_replicas, 3, transport)


# What goes wrong


class Fails(nn.Module):
    def __init__(self, how: str, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.how, self.left = how, at

    def forward(self, x):
        self.left -= 1
        if self.left == 0 and self.how == "raise":
            raise ZeroDivisionError("the user's own fault")
        if self.left == 0 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.left == 0 and self.how == "nan":
            return self.linear(x) * float("nan")
        return self.linear(x)


@pytest.mark.parametrize("transport", ["loopback", "threads"])
def test_an_error_leaves_the_parameters_in_their_places(transport: str) -> None:
    stages = [Fails("", 0), Fails("", 0), Fails("raise", 5)]
    before = [stage.linear.weight for stage in stages]
    with pl.Pipeline(stages, pipedream(num_ranks=3, num_microbatches=8), loss_fn=mse, transport=transport) as pipe:
        optimizer = OPTIMIZERS["sgd"](list(pipe.parameters()))
        stream = pl.Stream(pipe, optimizer, learning_rate=lambda batch: 0.1)
        with pytest.raises(
            StageError, match=r"rank 2, stage 2, action 2F4, micro-batch 4: ZeroDivisionError: the user"
        ):
            stream.run(make_batches(8))
        for stage, parameter in zip(stages, before, strict=True):
            assert stage.linear.weight is parameter
            assert parameter.grad is None
        assert optimizer.param_groups[0]["lr"] == 0.05
        with pytest.raises(RunError, match="cannot run any more"):
            stream.run(make_batches(8))


class Interrupts(nn.Module):
    """What Ctrl-C does, at the forward of that number: the main thread gets the signal wherever it is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.left = number

    def forward(self, x):
        self.left -= 1
        if not self.left:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return self.linear(x)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Who starts the tests in the background has them ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("transport", "number"), [("loopback", 3), ("threads", 1), ("threads", 100)])
def test_an_interrupt_comes_through_and_leaves_the_parameters_in_their_places(transport: str, number: int) -> None:
    others = set(threading.enumerate())  # of pipelines that nobody closed
    stages = [Interrupts(number), *make_stages(2)]
    before = [list(stage.parameters()) for stage in stages]
    with pl.Pipeline(stages, pipedream(num_ranks=3, num_microbatches=400), loss_fn=mse, transport=transport) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        with pytest.raises(KeyboardInterrupt):
            stream.run(make_batches(400))
        for stage, parameters in zip(stages, before, strict=True):
            assert all(one is other for one, other in zip(stage.parameters(), parameters, strict=True))
        assert not [t for t in set(threading.enumerate()) - others if t.name.startswith("rank")]
        with pytest.raises(RunError, match=r"cannot run any more .*KeyboardInterrupt"):
            stream.run(make_batches(400))


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True).double()

    def forward(self, x):
        return self.table((x > 0).long()).sum(-2)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1)])
def test_sparse_gradients_are_refused(replicas: tuple[int, ...]) -> None:
    with pytest.raises(RunError, match=r"stage 0, .* has a sparse gradient, .* sparse=False"):
        run([Embeds(), *make_stages(1)], make_schedule(Rule("stash", replicas), 6), make_batches(6), "sgd")


def test_nothing_of_the_user_is_kept_after_a_run() -> None:
    def give():
        yield from make_batches(6)

    batches = give()
    seen = weakref.ref(batches)
    pipe, stream = run(make_stages(2), make_schedule(Rule("stash", (1, 1)), 6), make_batches(6))
    stream.run(batches, num_batches=6)
    del batches
    assert seen() is None
    ((_, records), _) = pipe.records
    assert [str(record[0]) for record in records if record[0].op.value == "F"] == [f"0F{b}" for b in range(6)]


def test_a_run_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run is bound block by block: same numbers, and every action is recorded once."""
    rule, batches = Rule("stash", (1, 2, 1)), make_batches(30)
    expected, _ = run(make_stages(3), make_schedule(rule, 30), batches)
    monkeypatch.setattr("pipeloom.training.stream.stream_rank._BLOCK", 7)
    pipe, stream = run(make_stages(3), make_schedule(rule, 30), batches)
    compare(pipe, {name: parameter.detach() for name, parameter in expected.named_parameters()})
    for (rank, found), (_, whole) in zip(pipe.records, expected.records, strict=True):
        assert [action for action, _, _ in found] == [action for action, _, _ in whole]
        assert len(found) >= len(stream.program(30).orders[rank]) > 7
        assert all(0 < start <= end for _, start, end in found)


def test_numbers_that_are_not_finite_end_the_run() -> None:
    with pytest.raises(RunError, match=r"rank 1, stage 1, action 1STEP2, .* loss of micro-batch 2 is nan: training"):
        run([Fails("", 0), Fails("nan", 3)], pipedream(num_ranks=2, num_microbatches=8), make_batches(8))

    def wrong(output, targets):  # a finite loss with a gradient that is not
        return (output * 0).abs().sqrt().sum()

    with pl.Pipeline(make_stages(2), pipedream(num_ranks=2, num_microbatches=8), loss_fn=wrong) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        with pytest.raises(RunError, match=r"stage 1, .* update 0 of stage 1, for batch 0, has gradient norm nan"):
            stream.run(make_batches(8))


def _neighbour_fails(rank: int, transport: str, how: str, writers) -> None:
    stages = [Fails("", 0), Fails("", 0), Fails(how, 5)]
    pipe = pl.Pipeline(stages, pipedream(num_ranks=3, num_microbatches=12), loss_fn=mse, transport=transport)
    stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())), on_update=lambda batch, loss: None)
    try:
        stream.run(make_batches(12))
    except (PeerLost, StageError) as error:
        writers[rank].send(f"{type(error).__name__}: {error}")
    os._exit(0)  # the group is broken; this test is about the message


@pytest.mark.parametrize(("transport", "how"), [("shared-memory", "kill"), ("torch", "raise")])
def test_a_lost_peer_is_named(transport: str, how: str) -> None:
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(3)]
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(_neighbour_fails, 3, transport, how, [writer for _, writer in pipes])
    messages = [reader.recv() if reader.poll(1) else "" for reader, _ in pipes]
    if how == "raise":
        assert "StageError: rank 2, stage 2, action 2F4, micro-batch 4: ZeroDivisionError" in messages[2]
    for rank in (0, 1):
        assert messages[rank].startswith(f"PeerLost: rank {rank}, stage {rank}, action {rank}"), messages
        assert any(f": rank {peer} ended" in messages[rank] for peer in {0, 1, 2} - {rank})


# What is refused


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    stages, batches = make_stages(3), make_batches(12)
    flushed = pl.schedules.one_f_one_b(num_ranks=3, num_microbatches=4)
    pipe = pl.Pipeline(stages, flushed, loss_fn=mse)
    with pytest.raises(InputError, match="Stream of schedule '1f1b': a synchronous schedule has no weight versions"):
        pl.Stream(pipe, torch.optim.SGD(pipe.parameters()))
    with pl.Pipeline(stages, pipedream(num_ranks=4, num_microbatches=12, replicas=(2, 1, 1)), loss_fn=mse) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        stream = pl.Stream(pipe, optimizer)
        with pytest.raises(InputError, match=r"step\(\) does not run schedule 'pipedream'.* pipeloom.Stream"):
            pipe.step(*batches[0])
        for arguments, text in (
            (
                (batches[:11],),
                r"=11: a stream must end with an update of every stage\. Use a multiple of 2\.",
            ),
            ((iter(batches),), "without a length.* Pass num_batches"),
            (([],), "num_batches=0: must be at least 1"),
            ((None, 12), "batches is a NoneType: .* Pass an iterable"),
        ):
            with pytest.raises(InputError, match=text):
                stream.run(*arguments)
        parameter = next(iter(pipe.parameters()))
        parameter.grad = torch.zeros_like(parameter)
        with pytest.raises(InputError, match=r"parameter .* has a gradient: .*zero_grad"):
            stream.run(batches)
        parameter.grad = None
        handle = parameter.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(InputError, match="has a post-accumulate-grad hook"):
            stream.run(batches)
        handle.remove()
        with torch.no_grad(), pytest.raises(InputError, match=r"run\(\) inside torch.no_grad\(\)"):
            stream.run(batches)
        for options, text in (
            ({"max_norm": 0.0}, "max_norm=0.0"),
            ({"discount": "some"}, "discount='some'"),
            ({"discount": "pipemare"}, "discount_updates=None: must be an integer >= 1"),
            ({"discount": "inverse", "discount_updates": 3}, "=3: must be an integer >= 1 .* and None with other"),
        ):
            with pytest.raises(InputError, match=text):
                pl.Stream(pipe, optimizer, **options)
        with pytest.raises(InputError, match="parameters that are not the pipeline's"):
            pl.Stream(pipe, torch.optim.SGD(make_mlp().parameters()))
        stream.run(batches)  # none of all this changed anything
    tied = make_stages(3)
    tied[2][0][0].weight = tied[0][0][0].weight
    on_one_rank = replace(
        pl.schedules.build("interleaved", num_ranks=1, num_microbatches=4, num_chunks=3),
        weights=WeightPolicy.STASH,
        microbatches_per_update=2,
    )
    for schedule in (pipedream(num_ranks=3, num_microbatches=4), on_one_rank):
        with pytest.raises(InputError, match=r"stages \(0, 2\) hold the same parameters"):
            pl.Pipeline(tied, schedule, loss_fn=mse)
    with pytest.raises(InputError, match="which runs whole sequences"):
        pl.Pipeline(make_stages(2), pipedream(num_ranks=2, num_microbatches=4), loss_fn=mse, slices=[4])


def _disagree(rank: int) -> None:
    with pl.Pipeline(make_stages(2), pipedream(num_ranks=2, num_microbatches=6), loss_fn=mse) as pipe:
        optimizer = OPTIMIZERS["sgd"](list(pipe.parameters()))
        with pytest.raises(InputError, match="rank 0 runs with batches 6 and rank 1 with 5"):
            pl.Stream(pipe, optimizer).run(make_batches(6 - rank))
        with pytest.raises(InputError, match=r"rank 0 runs with max_norm 1.0 and rank 1 with 2.0"):
            pl.Stream(pipe, optimizer, max_norm=1.0 + rank).run(make_batches(6))
        with pytest.raises(InputError, match=r"rank 0 runs with scale_by_replicas False and rank 1 with True"):
            pl.Stream(pipe, optimizer, scale_by_replicas=bool(rank)).run(make_batches(6))
        told = []
        stream = pl.Stream(pipe, optimizer, on_update=(lambda *row: told.append(row)) if rank == 0 else None)
        updates = stream.run(make_batches(6))
        assert [(update.batch, update.loss) for update in updates] == told or rank == 1
        with pytest.raises(
            (RunError, PeerLost),
            match="inputs have 5 samples and targets 4: every sample needs a target" if rank else "rank 1",
        ):
            stream.run(make_batches(6, samples=5 - rank))


def test_ranks_that_disagree_are_told() -> None:
    run_ranks(_disagree, 2)


def _one_iterator(rank: int) -> None:
    """Replicas read every second batch; a middle rank none, and passes none."""
    schedule, batches = make_schedule(Rule("stash", (2, 1, 1)), 12), make_batches(12)
    with pl.Pipeline(make_stages(3), schedule, loss_fn=mse) as pipe:
        reads = pipe.needs_inputs or pipe.needs_targets
        given = iter(batches) if reads else None
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        updates = stream.run(given, 6) + stream.run(given, 6)
        assert not reads or next(given, None) is None
    with pl.Pipeline(make_stages(3), schedule, loss_fn=mse, transport="loopback") as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        assert updates == stream.run(batches[:6]) + stream.run(batches[6:])


def test_one_iterator_gives_the_batches_of_two_runs() -> None:
    run_ranks(_one_iterator, 4)


def _other_copies(rank: int) -> None:
    torch.manual_seed(rank)
    with pl.Pipeline(
        [nn.Linear(8, 8).double()], pipedream(num_ranks=2, num_microbatches=8, replicas=(2,)), loss_fn=mse
    ) as pipe:
        stream = pl.Stream(pipe, OPTIMIZERS["sgd"](list(pipe.parameters())))
        with pytest.raises(RunError, match="parameter 'weight' is not the same on this rank and on rank"):
            stream.run(make_batches(8))


def test_replicas_that_start_from_other_values_are_told() -> None:
    run_ranks(_other_copies, 2)
