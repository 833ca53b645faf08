"""Values that skip stages: gradients as in one process, one message per rank, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipeloom as pl
from pipeloom.errors import InputError, PipeloomError, ScheduleError, SplitError
from pipeloom.ir import Op
from pipeloom.parallel import run_threads
from pipeloom.pipe import Namespace, pop, skippable, stash
from tests.cpu.every_schedule import thinned_sizes
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks

WIDTH = 6


class Part(nn.Module):
    """A stage: adds what it pops, scaled by a parameter, and stashes its result."""

    def __init__(self, stage: int, stashes: tuple[str, ...], pops: tuple[str, ...], *, last: bool) -> None:
        super().__init__()
        self.stashes, self.pops, self._last = stashes, pops, last
        self._stage = str(stage)  # stages have names of their own
        self.layer = nn.ModuleDict({self._stage: nn.Linear(WIDTH, WIDTH)})
        self.scale = nn.ParameterDict({self._stage: nn.Parameter(torch.full((WIDTH,), 0.1 * (stage + 1)))})

    def forward(self, x: Tensor, popped: dict[str, Tensor] | None = None):
        for name, value in (popped or {}).items():
            x = x + (self.scale[self._stage] * value if not name.startswith("ids") else value[:, None] * 0.01)
        hidden = self.layer[self._stage](x)
        y = torch.tanh(hidden)
        if not self.stashes:
            return y
        made = {"ids": (x[:, 0] > 0).long()}
        return y, {name: made.get(name, hidden) for name in self.stashes}


def make(num_stages: int) -> list[nn.Module]:
    """Stage 0 stashes for three stages (the next and the last among them), stage 1 for the last, one value is whole."""
    torch.manual_seed(num_stages)
    last = num_stages - 1
    stashes: dict[int, tuple[str, ...]] = {0: ("a", "ids"), **({1: ("b",)} if num_stages > 2 else {})}
    pops: dict[int, list[str]] = {last: ["a", "ids", "b"] if num_stages > 2 else ["a", "ids"]}
    for stage in range(1, last):
        if stage % 2:
            pops.setdefault(stage, []).append("a")
    parts = range(num_stages)
    return [Part(s, stashes.get(s, ()), tuple(pops.get(s, ())), last=s == last).double() for s in parts]


def in_one_process(modules: list[nn.Module], x: Tensor) -> Tensor:
    kept: dict[str, Tensor] = {}
    for module in modules:
        out = module(x, {name: kept[name] for name in module.pops}) if module.pops else module(x)
        x, made = out if module.stashes else (out, {})
        kept |= made
    return x


def expect(num_stages: int, x: Tensor, y: Tensor, num_microbatches: int) -> tuple[Tensor, dict[str, Tensor]]:
    modules = make(num_stages)
    total = torch.zeros((), dtype=torch.float64)
    for a, b in zip(x.tensor_split(num_microbatches), y.tensor_split(num_microbatches), strict=True):
        loss = F.mse_loss(in_one_process(modules, a), b) * (len(a) / len(x))
        loss.backward()
        total += loss.detach()
    named = ((name, p) for module in modules for name, p in module.named_parameters())
    return total, {name: p.grad for name, p in named if p.grad is not None}


def batch(num_samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_samples)
    x, y = torch.randn(2, num_samples, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def train(schedule, transport: str, recompute: str = "none", device: str = "cpu", **options) -> None:
    x, y = batch(schedule.num_microbatches * 2 + 1)
    loss, expected_gradients = expect(schedule.num_stages, x, y, schedule.num_microbatches)
    gradients = {name: gradient.to(device) for name, gradient in expected_gradients.items()}
    modules = [module.to(device) for module in make(schedule.num_stages)]
    x, y = x.to(device), y.to(device)
    with pl.Pipeline(
        modules, schedule, loss_fn=F.mse_loss, transport=transport, recompute=recompute, **options
    ) as pipe:
        live = pl.check(pipe.program).live_activations
        for _ in range(2):
            for parameter in pipe.parameters():
                parameter.grad = None
            assert abs(pipe.step(x, y) - loss) < 1e-12
        assert all(pipe.memory.peak_live_activations[rank] == live[rank] for rank in pipe.executor.local_ranks)
        for name, parameter in pipe.named_parameters():
            expected = gradients.get(name, torch.zeros_like(parameter))
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert torch.allclose(found, expected, rtol=0, atol=1e-12), (schedule.name, name)
        assert abs(pipe.evaluate(x, y) - loss) < 1e-12
        output = pipe.forward(x)
        if output is not None:
            whole = in_one_process([module.to(device) for module in make(schedule.num_stages)], x)
            assert torch.allclose(output, whole, rtol=0, atol=1e-12)
        for worker in pipe.executor.workers.values():
            state = worker.state
            assert not any((state.skip_values, state.skip_gradients, state.skip_counts, state.departing))


def _schedules(num_ranks: int, whole: bool):
    """Every family on three ranks, and on two or four, alternately; in whole grids on all."""
    families = list(pl.schedules.SYNCHRONOUS)
    for turn, (family, num_chunks, tried) in enumerate(thinned_sizes(num_ranks)):
        if not whole and num_ranks != 3 and families.index(family) % 2 == num_ranks // 4:
            continue
        microbatches = tried[(turn + num_ranks) % len(tried)]
        schedule = pl.schedules.build(family, num_ranks=num_ranks, num_microbatches=microbatches, num_chunks=num_chunks)
        if schedule.num_slices == 1:
            yield schedule


@pytest.mark.parametrize("whole", fewer(False, True))
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process(num_ranks: int, whole: bool) -> None:
    for turn, schedule in enumerate(_schedules(num_ranks, whole)):
        train(schedule, ("loopback", "threads")[turn % 2], ("none", "full")[turn % 4 == 0])


def _in_a_process(rank: int, transport: str) -> None:
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-v", 2)):
        schedule = pl.schedules.build(name, num_ranks=3, num_microbatches=6, num_chunks=chunks)
        train(schedule, transport)


@pytest.mark.parametrize("transport", ["shared-memory", "torch"])
def test_in_processes(transport: str) -> None:
    run_ranks(_in_a_process, 3, transport)


def _replica(models: list[list[nn.Module]], expected) -> None:
    schedule = pl.schedules.build("zb-h1", num_ranks=3, num_microbatches=4)
    mesh = pl.Mesh(pp=3, dp=2)
    x, y = batch(16)
    loss, gradients = expected
    mine = slice(0, 8) if mesh.coordinate("dp") == 0 else slice(8, 16)
    with pl.Pipeline(models.pop(), schedule, loss_fn=F.mse_loss, mesh=mesh) as pipe:
        assert abs(pipe.step(x[mine], y[mine]) - loss) < 1e-12
        for name, parameter in pipe.named_parameters():
            if name in gradients:
                assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-12), name


def test_replicas() -> None:
    models, expected = [make(3) for _ in range(6)], expect(3, *batch(16), 8)  # threads share the random generator
    run_threads(6, lambda: _replica(models, expected))


def test_offloaded_activations(tmp_path) -> None:
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=6)
    x, y = batch(12)
    loss, gradients = expect(3, x, y, 6)
    offload = pl.OffloadActivations(f"disk:{tmp_path}", most=3)
    with pl.Pipeline(make(3), schedule, loss_fn=F.mse_loss, offload=offload) as pipe:
        assert abs(pipe.step(x, y) - loss) < 1e-12
        for name, parameter in pipe.named_parameters():
            if name in gradients:
                assert torch.allclose(parameter.grad, gradients[name], rtol=0, atol=1e-12), name


def test_a_value_reaches_every_rank_once_and_no_message_stays_on_a_rank() -> None:
    schedule = pl.schedules.build("interleaved", num_ranks=2, num_microbatches=2, num_chunks=3)
    with pl.Pipeline(make(6), schedule, loss_fn=F.mse_loss) as pipe:
        sends = [str(action) for _, action in pipe.program.actions() if action.op is Op.SEND_SKIP]
    # Stage 0 is on rank 0; "a" goes to stages 1, 3 and 5, all on rank 1, "b" from stage 1 to 5 stays there.
    assert sorted(sends) == ["0SEND_SKIP0.1", "0SEND_SKIP0.5", "0SEND_SKIP1.1", "0SEND_SKIP1.5"]
    assert [tuple(skip) for skip in pipe.program.skips] == [
        *((0, 1, True), (0, 5, True), (1, 3, True), (1, 5, True), (3, 5, True))
    ]


def test_in_place_work_on_a_popped_value() -> None:
    @skippable(stash=["a"])
    class Maker(nn.Linear):
        def forward(self, x):
            yield stash("a", x * self.weight[0, 0])
            return nn.Linear.forward(self, x)

    @skippable(pop=["a"])
    class User(nn.Linear):
        def forward(self, x):
            return nn.Linear.forward(self, x) + (yield pop("a")).relu_()

    def stages():
        torch.manual_seed(1)
        return [Maker(3, 3), nn.Linear(3, 3), User(3, 3)]

    x, y = torch.randn(4, 3), torch.randn(4, 3)
    plain = nn.Sequential(*stages())
    F.mse_loss(plain(x), y).backward()
    schedule = pl.schedules.build("1f1b", num_ranks=3, num_microbatches=2)
    with pl.Pipeline(stages(), schedule, loss_fn=F.mse_loss) as pipe:
        pipe.step(x, y)
        expected = [p.grad for p in plain.parameters()]
        assert all(torch.allclose(p.grad, e) for p, e in zip(pipe.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: ((), ("x",))}, "stage 0 pops 'x'"),
        ({0: (("x",), ())}, "no later stage pops it"),
        ({0: (("x",), ()), 1: (("x",), ())}, "both stash 'x'"),
        ({0: ("x", ())}, "must be a tuple of names"),
    ],
)
def test_wrong_declarations(changed, message: str) -> None:
    modules = [Part(s, *changed.get(s, ((), ())), last=s == 2) for s in range(3)]
    with pytest.raises(SplitError, match=message):
        pl.Pipeline(modules, pl.schedules.build("1f1b", num_ranks=3, num_microbatches=2))


def test_refused_combinations() -> None:
    with pytest.raises(ScheduleError, match="updates inside"):
        pl.Pipeline(make(2), pl.schedules.build("pipedream", num_ranks=2, num_microbatches=4), loss_fn=F.mse_loss)
    with pytest.raises(InputError, match="skip stages"):
        pl.Pipeline(make(2), pl.schedules.build("seq1f1b", num_ranks=2, num_microbatches=2, num_slices=2))
    modules = make(3)
    modules[0].forward = lambda x: x  # type: ignore[method-assign]
    with (
        pl.Pipeline(modules, pl.schedules.build("1f1b", num_ranks=3, num_microbatches=2), loss_fn=F.mse_loss) as pipe,
        pytest.raises(PipeloomError, match="must return"),
    ):
        pipe.step(*batch(4))


@skippable(stash=["a"])
class Stash(nn.Linear):
    def forward(self, x):
        yield stash("a", x * self.bias)
        return nn.Linear.forward(self, x)


@skippable(pop=["a"])
class Pop(nn.Linear):
    def forward(self, x):
        return nn.Linear.forward(self, x) * (yield pop("a"))


def unet() -> nn.Sequential:
    """Two skips of one name, one inside the other."""
    torch.manual_seed(0)
    outer = Namespace()
    layers = [Stash(4, 4).isolate(outer), Stash(4, 4), nn.Tanh(), nn.Linear(4, 4), Pop(4, 4), Pop(4, 4).isolate(outer)]
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("cut", [[1, 1, 4], [3, 2, 1], [1, 1, 2, 2]])
def test_a_chain_with_skips_is_the_same_in_a_pipeline_a_pipe_and_alone(cut: list[int]) -> None:
    x, y = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone, model, threads = unet(), unet(), unet()
    expected = F.mse_loss(alone(x), y)
    pipe = pl.Pipe(threads, cut, devices=["cpu"] * len(cut), chunks=4)
    F.mse_loss(pipe(x), y).backward()
    expected.backward()
    schedule = pl.schedules.build("1f1b", num_ranks=len(cut), num_microbatches=4)
    given: Any = model if len(cut) == 3 else [model[:1], model[1:2], model[2:4], model[4:]]
    options = {"cut": cut} if given is model else {}
    with pl.Pipeline(given, schedule, loss_fn=F.mse_loss, recompute="full", **options) as pipeline:
        assert torch.allclose(pipeline.step(x, y), expected, rtol=1e-12)
    for found in (model, threads):
        for one, other in zip(found.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_skips_inside_a_stage_are_no_messages_and_wrong_ones_are_told() -> None:
    assert pl.split.split(unet(), 2, cut=[4, 2]).skips != ()
    assert pl.split.split(unet()[1:5], 2, cut=[1, 3]).skips != ()
    assert pl.split.split(nn.Sequential(nn.Linear(4, 4), *unet()[1:5]), 2, cut=[1, 4]).skips == ()
    for layers in (unet()[:3], unet()[4:], [*unet(), Pop(4, 4)], [Stash(4, 4), *unet()]):
        with pytest.raises(SplitError, match="stash and pop do not pair") as error:
            pl.split.split(nn.Sequential(*layers), 2)
        assert "\n" not in str(error.value)
