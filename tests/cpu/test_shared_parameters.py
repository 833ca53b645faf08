"""What copies of a pipeline keep: names, ranges, formats, buffers, bytes; and what is refused."""

from __future__ import annotations

import time
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost, RunError, StageError
from pipeloom.ir import DataStrategy
from tests.cpu.copies import check_equal_on_copies
from tests.cpu.pairwise import fewer, in_turn, pairwise
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, make_mlp, tokens

STRATEGIES = tuple(DataStrategy)
ONE = pl.schedules.build("1f1b", num_ranks=1, num_microbatches=2)


def mse(output, targets):
    return nn.functional.mse_loss(output, targets)


def halves(*values):
    """This process's samples."""
    rank = torch.distributed.get_rank()
    return [value.chunk(2)[rank] for value in values]


class Odd(nn.Module):
    """Layers with a frozen, an unused and a scalar parameter, and a buffer that forwards change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.norm = nn.BatchNorm1d(7)
        self.used_by = -1

    def forward(self, x):
        y = self.norm(self.first(x)) * self.scale
        return y + self.unused.sum() if torch.distributed.get_rank() == self.used_by else y


def _train_odd(rank: int) -> None:
    mesh = pl.Mesh(dp=-1)
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 7)
    for strategy in STRATEGIES:
        for used_by in (-1, 1):  # nobody; the second copy alone
            torch.manual_seed(3)
            model = Odd()
            model.used_by = used_by
            seen = []
            model.first.weight.register_hook(lambda g, seen=seen: seen.append(g.shape))
            frozen, weight = model.first.bias.clone(), model.first.weight.clone()
            with pl.Pipeline(model, ONE, loss_fn=mse, mesh=mesh, data=strategy) as pipe:
                assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in model.named_parameters()]
                optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
                pipe.step(*halves(x, y))
                assert seen == [weight.shape] * 2, "hooks see each micro-batch's gradient of the whole parameter"
                main = dict(pipe.named_parameters())
                assert main["first.bias"].grad is None
                assert not main["first.bias"].requires_grad
                if main["unused"].numel():
                    assert (main["unused"].grad is None) == (used_by == -1), strategy
                optimizer.step()
                state = pipe.state_dict()
                for name in ("first.weight", "scale", "unused", "first.bias"):
                    check_equal_on_copies(state[name], mesh)
                assert torch.equal(state["first.bias"], frozen)
                main["first.bias"].requires_grad_(True)
                main["scale"].requires_grad_(False)
                optimizer.zero_grad()
                pipe.step(*halves(x, y))
                assert main["scale"].grad is None
                assert main["first.bias"].grad is not None or not main["first.bias"].numel()
                assert not torch.equal(state["first.weight"], weight)
                model.first.bias.requires_grad_(False)  # by the module, as one does while training
                model.scale.requires_grad_(True)
                optimizer.zero_grad()
                pipe.step(*halves(x, y))
                assert main["first.bias"].grad is None
                assert not main["first.bias"].requires_grad
                assert main["scale"].grad is not None or not main["scale"].numel()
                means = [torch.empty(7) for _ in range(2)]
                torch.distributed.all_gather(means, state["norm.running_mean"])
                assert not torch.equal(*means), "each copy has statistics of its own samples"


def test_frozen_unused_and_scalar_parameters_hooks_and_buffers() -> None:
    run_ranks(_train_odd, 2)


def _round_trip(rank: int, cases: list[tuple[DataStrategy, str | None, str]]) -> None:
    mesh = pl.Mesh(dp=2)
    batch = halves(*tokens(6))
    for strategy, precision, layout in cases:
        options = {"data": pl.DataParallel(strategy, layout=layout), "precision": precision}
        with pl.Pipeline(make_gpt(tied=True, layers=2), ONE, loss_fn=language_loss, mesh=mesh, **options) as pipe:
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.5)
            pipe.step(*batch)
            optimizer.step()
            state = {name: value.clone() for name, value in pipe.state_dict().items()}
            loss = pipe.evaluate(*batch)
            main, ranges = pipe.state.main_state(), pipe.state.ranges
            assert (len(ranges) > 0) == (strategy != "ddp" and not (strategy == "parameter-server" and not rank))
            for name, parameter in pipe.named_parameters():
                start, stop, shape = ranges.get(name, (0, parameter.numel(), parameter.shape))
                assert tuple(state[name].shape) == tuple(shape)
                assert torch.equal(state[name].flatten()[start:stop], main[name].flatten())
                assert main[name].data_ptr() == parameter.data_ptr()
                if layout == "parameters":
                    assert parameter.dim() == len(shape) or not parameter.numel()
        with pl.Pipeline(make_gpt(tied=True, layers=2), ONE, loss_fn=language_loss, mesh=mesh, **options) as other:
            other.load_state_dict(state)
            assert torch.equal(other.evaluate(*batch), loss)
            assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
            for value in other.state.main_state().values():
                value.zero_()
            other.state.refresh()
            assert all(not value.any() for value in other.state_dict().values())
            for name, value in main.items():
                other.state.main_state()[name].copy_(value)
            assert torch.equal(other.evaluate(*batch), loss)


ROUND_TRIPS = list(product(STRATEGIES, (None, "bf16"), ("elements", "parameters")))


@pytest.mark.parametrize("cases", fewer(pairwise(ROUND_TRIPS), ROUND_TRIPS), ids=["pairs", "all"])
def test_states_go_out_and_in_whole_and_in_parts(cases: list[tuple[DataStrategy, str | None, str]]) -> None:
    run_ranks(_round_trip, 2, cases)


FORMATS = pl.Precision("bf16"), pl.Precision("bf16", gradients="same"), pl.Precision("fp16")


def _formats(rank: int, whole: bool) -> dict[str, list[float]]:
    """Losses of some updates: every format with every other strategy, or with all in the `whole` grid."""
    mesh, losses = pl.Mesh(dp=2), {}
    for row, precision in enumerate(FORMATS):
        for strategy in STRATEGIES if whole else STRATEGIES[row % 2 :: 2]:
            with pl.Pipeline(
                make_gpt(tied=True, layers=2), ONE, loss_fn=language_loss, mesh=mesh, data=strategy, precision=precision
            ) as pipe:
                pipe.loss_scale = 1024.0 if precision.dtype == "fp16" else 1.0
                optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
                steps = pl.BarrierStep(pipe, optimizer, max_norm=1.0)
                wanted = torch.bfloat16 if precision.gradients == "same" else torch.float32
                assert {p.dtype for p in pipe.parameters()} == {torch.float32}
                updates = [steps.step(*halves(*tokens(6)))[0] for _ in range(4)]
                pipe.step(*halves(*tokens(6)))
                assert {p.grad.dtype for p in pipe.parameters() if p.grad is not None} <= {wanted}
                assert all(update.applied for update in updates)
                losses.setdefault(str(precision), []).append([float(update.loss) for update in updates])
                for value in pipe.state_dict().values():
                    check_equal_on_copies(value, mesh)
                if precision.dtype == "fp16":
                    before = pipe.state_dict()["head.weight"].clone()
                    pipe.loss_scale = 2.0**40
                    (update,) = steps.step(*halves(*tokens(6)))
                    assert not update.applied
                    assert not update.grad_norm.isfinite()
                    assert torch.equal(pipe.state_dict()["head.weight"], before)
    return losses


@pytest.mark.parametrize("whole", fewer(False, True))
def test_sixteen_bits_train_with_masters_of_thirty_two(whole: bool) -> None:
    reference, expected = make_gpt(tied=True, layers=2), []
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for _ in range(4):
        inputs, targets = tokens(6)
        loss = language_loss(reference(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert expected[-1] < expected[0] - 0.2
    for precision, by_strategy in run_ranks(_formats, 2, whole)[0].items():
        for losses in by_strategy:
            assert losses == pytest.approx(expected, abs=0.03), precision


@pytest.mark.parametrize(("strategy", "transport"), in_turn(STRATEGIES, ["loopback", "threads"]), ids=str)
def test_masters_in_one_process(transport: str, strategy: str) -> None:
    """Two ranks with one copy: what is gathered comes from masters here; float32 sums of bf16 gradients."""
    schedule = pl.schedules.build("zb-v", num_ranks=2, num_microbatches=4)
    inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
    model = make_mlp()
    masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    options = {"data": strategy, "precision": "bf16", "transport": transport}
    with pl.Pipeline(model, schedule, loss_fn=mse, **options) as pipe:
        pipe.step(inputs, targets)
        reference = make_mlp().to(torch.bfloat16)
        sums = {name: torch.zeros_like(value) for name, value in masters.items()}
        for x, y in zip(inputs.bfloat16().split(2), targets.split(2), strict=True):
            (mse(reference(x).float(), y) / 4).backward()
            for name, parameter in reference.named_parameters():
                sums[name] += parameter.grad
                parameter.grad = None
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.detach().view_as(masters[name]), masters[name])
            torch.testing.assert_close(parameter.grad.view_as(sums[name]), sums[name], rtol=1e-6, atol=1e-9)
        again = {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}
        pipe.step(inputs, targets)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, 2 * again[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_has_statistics_keeps_its_format(precision: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Linear(8, 8))
    schedule = pl.schedules.build("zb-h1", num_ranks=2, num_microbatches=2)
    with pl.Pipeline(model, schedule, loss_fn=mse, data="zero3", precision=precision) as pipe:
        assert pipe.step(torch.randn(8, 8), torch.randn(8, 8)).isfinite()
        assert all(parameter.grad.dtype == torch.float32 for parameter in pipe.parameters())
        assert [p.dtype for p in model[1].parameters()] == [model[1].running_mean.dtype] * 2 == [torch.float32] * 2
        assert {p.dtype.itemsize for layer in (0, 2, 3) for p in model[layer].parameters()} == {2}


def _bytes(rank: int) -> dict[str, tuple[float, ...]]:
    """Bytes a parameter, on one rank, between steps and at most in one; of layers of one size."""
    mesh, found = pl.Mesh(dp=2), {}
    schedule = pl.schedules.build("gpipe", num_ranks=1, num_microbatches=2)
    for strategy, granularity in (*((s, None) for s in STRATEGIES), ("zero2", "microbatch"), ("zero3", "microbatch")):
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(20)])
        data = pl.DataParallel(strategy, granularity=granularity, bucket_bytes=0)
        with pl.Pipeline(
            model, schedule, loss_fn=mse, mesh=mesh, data=data, precision=pl.Precision("bf16", gradients="same")
        ) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3)
            pipe.memory.record_peaks()
            for _ in range(2):
                optimizer.zero_grad()
                pipe.step(torch.randn(4, 64), torch.randn(4, 64))
                peak = pipe.memory.peak_bytes()
                pl.update_parameters(optimizer)
            states = sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim())
            n = 20 * 64 * 64
            found[f"{strategy} {granularity}"] = tuple(b / n for b in (*pipe.memory.held_bytes(), states, *peak))
    return found


def test_bytes_are_those_of_the_formulas() -> None:
    """Of 16-bit parameters and gradients, masters and two states of Adam, with two copies.

    Above 2N/d of gradients a layer may be on its way, and a second one computing: a tenth of all.
    """
    on_both = run_ranks(_bytes, 2)
    near = lambda *values: pytest.approx(values, abs=0.01)  # noqa: E731
    for found in on_both:
        held, peaks = {k: v[:4] for k, v in found.items()}, {k: v[4:] for k, v in found.items()}
        assert held["ddp None"] == near(2, 4, 2, 8)
        for strategy in ("zero1 None", "zero2 None", "zero2 microbatch"):
            assert held[strategy] == near(2, 2, 1, 4)
        for strategy in ("zero3 None", "zero3 microbatch"):
            assert held[strategy] == near(0, 2, 1, 4)
        assert peaks["zero3 None"][0] == pytest.approx(2, abs=0.01)
        assert peaks["zero3 microbatch"][0] == pytest.approx(0.2, abs=0.01)  # two layers of twenty
        assert peaks["ddp None"][1] == pytest.approx(2, abs=0.25)
        assert peaks["zero1 None"][1] == pytest.approx(2, abs=0.3)
        for strategy in ("zero2 microbatch", "zero3 microbatch"):
            assert peaks[strategy][1] == pytest.approx(1, abs=0.3)
    assert on_both[0]["parameter-server None"][:4] == near(2, 4, 2, 8)
    assert on_both[1]["parameter-server None"][:4] == near(2, 0, 0, 0)


class Reentrant(nn.Module):
    """A layer that runs twice, each time under the kind of checkpoint that runs a backward inside the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()

    def forward(self, x):
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(lambda v: self.inner(v).tanh(), x, use_reentrant=True)
        return x


def _late(rank: int) -> None:
    mesh = pl.Mesh(dp=2)
    x, y = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8).double(), Reentrant(), nn.Linear(8, 8).double())
        torch.distributed.broadcast(x, 0)
        torch.distributed.broadcast(y, 0)
        mse(model(x), y).backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        with pl.Pipeline(model, ONE, layers=["0", "1", "2"], loss_fn=mse, mesh=mesh, data=strategy) as pipe:
            pipe.step(*halves(x, y))
            for name, parameter in pipe.named_parameters():
                start, stop, _ = pipe.state.ranges.get(name, (0, parameter.numel(), None))
                if parameter.numel():
                    got, want = parameter.grad.flatten(), wanted[name].flatten()[start:stop]
                    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


def test_gradients_that_come_after_their_reduction_began_are_not_lost() -> None:
    run_ranks(_late, 2)


class Chosen(nn.Module):
    """A layer of which each sample takes a part, as of experts, or nothing: copies have other graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        kind = int(x.detach().abs().sum() * 1e3) % 3
        return x if kind == 2 else x + self.parts[kind](x)


def _choose(rank: int) -> None:
    mesh = pl.Mesh(dp=2)
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).double()
    for strategy, granularity in [("ddp", "step"), *product(("zero2", "zero3"), ("chunk", "microbatch"))]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), *[Chosen() for _ in range(6)]).double()
        names = [str(index) for index in range(7)]
        for copy in range(2):
            for piece, target in zip(x.chunk(2)[copy].chunk(2), y.chunk(2)[copy].chunk(2), strict=True):
                (mse(model(piece), target) / 4).backward()
        wanted = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        data = pl.DataParallel(strategy, granularity=granularity)
        with pl.Pipeline(model, ONE, layers=names, loss_fn=mse, mesh=mesh, data=data) as pipe:
            pipe.step(*halves(x, y))
            for name, parameter in pipe.named_parameters():
                start, stop, _ = pipe.state.ranges.get(name, (0, parameter.numel(), None))
                if wanted[name] is None or not parameter.numel():
                    assert parameter.grad is None
                    continue
                got, want = parameter.grad.flatten(), wanted[name].flatten()[start:stop]
                torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-14)


def test_copies_whose_samples_take_other_ways_through_the_model_start_their_collectives_in_one_order() -> None:
    run_ranks(_choose, 2)


def _overlap(rank: int) -> None:
    """Of a stage of four layers, three reductions begin before the last backward has ended."""
    from pipeloom.parallel.data.unit_gradients import UnitGradients

    mesh, order = pl.Mesh(dp=2), []
    model = make_mlp(depth=4)
    start = UnitGradients.start
    # This process ends with the test.
    UnitGradients.start = lambda self, look: (order.append("reduce"), start(self, look))[1]
    model[0][0].weight.register_hook(lambda g: order.append("first layer"))
    layers, data = ["0", "1", "2", "3"], pl.DataParallel(bucket_bytes=8 * 8 * 4)
    with pl.Pipeline(model, ONE, loss_fn=mse, mesh=mesh, layers=layers, data=data) as pipe:
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    assert order == ["first layer"] + ["reduce"] * 3 + ["first layer", "reduce"]


def test_reductions_begin_inside_the_last_backward() -> None:
    run_ranks(_overlap, 2)


def _refusals(rank: int) -> None:
    mesh = pl.Mesh(dp=2)
    build = {"loss_fn": mse, "mesh": mesh}
    with pytest.raises(InputError, match=r"'0' \(Embedding\) produces sparse gradients.*sparse=False"):
        pl.Pipeline(nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)), ONE, **build)
    block = nn.Sequential(nn.Linear(4, 4))
    block.sparse = True  # says nothing of gradients: the parameters are those of a layer inside
    pl.Pipeline(nn.Sequential(block), ONE, **build).close()
    with pytest.raises(InputError, match="data strategy='zero4': unknown"):
        pl.Pipeline(make_mlp(), ONE, **build, data="zero4")
    with pytest.raises(InputError, match="fp16 with gradients 'same'"):
        pl.Pipeline(make_mlp(), ONE, **build, precision=pl.Precision("fp16", gradients="same"))
    with pytest.raises(InputError, match="does not work with asynchronous schedule"):
        pl.Pipeline(make_mlp(), pl.schedules.build("pipedream", num_ranks=1, num_microbatches=4), **build)
    with pytest.raises(InputError, match="stays inside one process"):
        pl.Pipeline(make_mlp(), ONE, **build, transport="loopback")
    with pytest.raises(InputError, match="differ in their buckets, number formats or offload"):
        pl.Pipeline(make_mlp(), ONE, **build, precision=("bf16", "fp16")[rank])
    with pl.Pipeline(make_mlp(), ONE, **build) as pipe:
        with pytest.raises(InputError, match=r"neither data parallelism nor 16-bit formats.*Use BarrierStep"):
            pl.PostValidatedStep(pipe, torch.optim.SGD(pipe.parameters()))
        with pytest.raises(InputError, match=r"loss_scale=2.0: only 16-bit gradients are scaled"):
            pipe.loss_scale = 2.0
    model = make_mlp()
    with pl.Pipeline(model, ONE, **build, data="zero1"), pytest.raises(InputError, match="held by another Pipeline"):
        pl.Pipeline(model, ONE, **build, data="zero2")
    pl.Pipeline(model, ONE, **build, data="zero3").close()
    with pytest.raises(InputError, match="Build a new model"):
        pl.Pipeline(model, ONE, **build, precision="bf16")
    dense = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4))
    with pl.Pipeline(dense, ONE, **build) as pipe:
        dense[0].sparse = True
        with pytest.raises(RunError, match=r"parameter .0\.weight. has a sparse gradient"):
            pipe.step(torch.tensor([0, 1]), torch.zeros(2, 4))


def test_what_cannot_be_shared_is_refused_in_one_line() -> None:
    run_ranks(_refusals, 2)


class Merged(nn.Module):
    """x (A B) + c: a product of two weights before the product with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(8, 3)), nn.Parameter(torch.randn(8, 3))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.down @ self.up.t()).tanh()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(2, 2, 3, padding=1)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))

    def forward(self, x):
        return self.normed(self.inner(x.view(-1, 2, 4)).flatten(1).tanh())


@pytest.mark.parametrize(("name", "granularity"), in_turn(["zb-v", "1f1b"], ["step", "chunk", "microbatch"]))
def test_backwards_in_halves_read_no_parameters_that_were_freed(granularity: str, name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4) for kind in (Merged, Convolved)]).double()
    x, y = torch.randn(8, 8).double(), torch.randn(8, 8).double()
    mse(model(x), y).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    data = pl.DataParallel("zero3", granularity=granularity)
    with pl.Pipeline(model, schedule, loss_fn=mse, data=data) as pipe:
        pipe.step(x, y)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-13)
        assert all(parameter.isnan().all() for parameter in model.parameters()), "nothing stays gathered"
        assert pipe.memory.held_bytes().parameters < 1000


class Fragile(nn.Module):
    """Raises in the third forward, where that is this process's to do."""

    calls = 0

    def __init__(self, here: bool) -> None:
        super().__init__()
        self.here = here

    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and self.here:
            raise ValueError("third time")
        return x


def _one_copy_fails(rank: int, strategy: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Fragile(rank == 1), nn.Linear(8, 8))
    pipe = pl.Pipeline(model, ONE, loss_fn=mse, mesh=pl.Mesh(dp=2), data=strategy)
    pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises((PeerLost, StageError)[rank], match=("another replica", "third time")[rank]):
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))
    with pytest.raises(RunError, match="cannot run any more"):
        pipe.step(torch.randn(4, 8), torch.randn(4, 8))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_copy_that_fails_ends_the_others(strategy: str) -> None:
    run_ranks(_one_copy_fails, 2, strategy)


def _one_copy_fails_and_lives_on(rank: int, pp: int, strategy: str) -> None:
    """The second copy raises in its third forward: nobody ends. Its first stage alone refuses its inputs: all do."""
    for bad_inputs in (False, True)[: 2 if pp > 1 else 1]:
        with pl.Mesh(pp=pp, dp=3) as mesh:
            copy, stage = mesh.coordinate("dp"), mesh.coordinate("pp")
            fragile = Fragile(copy == 1 and not bad_inputs)
            model = nn.Sequential(nn.Linear(8, 8), fragile, nn.Linear(8, 8), nn.Linear(8, 8))
            schedule = pl.schedules.one_f_one_b(num_ranks=pp, num_microbatches=2)
            pipe = pl.Pipeline(model, schedule, loss_fn=mse, mesh=mesh, data=strategy)
            x, y = torch.randn(4, 8), torch.randn(4, 8)
            pipe.step(x, y)
            fails = copy == 1 and stage == 0
            if bad_inputs:
                with pytest.raises(InputError, match="inputs=None"):
                    pipe.step(None if fails else x, y)
                pipe.step(x, y)
                pipe.close()
                continue
            with pytest.raises((PeerLost, StageError)[fails]):
                pipe.step(x, y)
            with pytest.raises(RunError, match="cannot run any more"):
                pipe.step(x, y)
            if stage == 0:
                with pytest.raises(InputError, match=r"a pipeline on it failed\. Make a new mesh"):
                    mesh.group("dp")
            torch.distributed.barrier()  # of a group of its own, which nothing happened to


@pytest.mark.parametrize(("pp", "strategy"), [(1, "ddp"), (1, "zero3"), (2, "zero2")])
def test_others_are_told_at_once_of_a_copy_that_fails(pp: int, strategy: str) -> None:
    """Nobody waits for the half hour of `timeout_seconds`, and what is made anew works."""
    run_ranks(_one_copy_fails_and_lives_on, 3 * pp, pp, strategy)


def _wait_for_a_copy_that_does_not_come(rank: int, done: Path) -> str:
    mesh = pl.Mesh(dp=2)
    model = nn.Linear(4, 2)
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=1)
    pipe = pl.Pipeline(model, schedule, loss_fn=mse, mesh=mesh, data="zero2", timeout_seconds=3.0)
    if rank == 0:
        with pytest.raises(PeerLost) as raised:
            pipe.step(torch.randn(2, 4), torch.randn(2, 2))
        done.touch()
        return str(raised.value)
    while not done.exists():  # it neither comes nor ends
        time.sleep(0.01)
    return ""


def test_copies_wait_no_longer_than_they_were_told(tmp_path: Path) -> None:
    waited, _ = run_ranks(_wait_for_a_copy_that_does_not_come, 2, tmp_path / "done")
    assert "another process ended, or timed out" in waited


def _update_whole_parameters_in_pieces(rank: int) -> None:
    for layout in ("elements", "parameters"):
        data = pl.DataParallel("zero1", layout=layout)
        with pl.Pipeline(nn.Linear(16, 16), ONE, loss_fn=mse, mesh=pl.Mesh(dp=2), data=data) as pipe:
            optimizer = torch.optim.Adafactor([p for p in pipe.parameters() if p.numel()])
            if layout == "elements":
                with pytest.raises(InputError, match=r"Adafactor cannot update shards of .*layout=\"parameters\""):
                    pl.BarrierStep(pipe, optimizer)
            else:
                pl.BarrierStep(pipe, optimizer).step(*halves(torch.randn(8, 16), torch.randn(8, 16)))


def test_optimizers_that_look_at_whole_parameters_are_refused_pieces() -> None:
    run_ranks(_update_whole_parameters_in_pieces, 2)
