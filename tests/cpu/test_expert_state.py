"""Experts are shared between expert-data replicas alone: updates, norms, values and bytes are those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.ir import DataStrategy
from pipeloom.parallel.data.replica_groups import ReplicaGroups
from pipeloom.parallel.data.sharing import DataSharing
from pipeloom.parallel.placed import is_expert, placed_block
from tests.cpu.expert_model import EXPERTS, INNER, WIDTH, build, on_mesh, own_batch, pipeline
from tests.cpu.ranks import run_ranks

BY_MICROBATCH = {"granularity": "microbatch", "bucket_bytes": 0}


class Case(NamedTuple):
    """One training run."""

    schedule: str
    strategy: str
    degrees: dict[str, int]
    options: dict[str, Any] | None = None  # of `DataParallel`

    def __str__(self) -> str:
        degrees = [f"{axis}{degree}" for axis, degree in self.degrees.items()]
        return "-".join([self.schedule, self.strategy, *degrees, *map(str, (self.options or {}).values())])


# Any two of a schedule, a strategy and degrees: those with expert-data replicas, and those without.
CASES = [
    Case("1f1b", "ddp", {"dp": 2, "ep": 2}),
    Case("1f1b", "zero1", {"dp": 4, "ep": 2}),
    Case("interleaved", "zero2", {"dp": 2, "ep": 2}),
    Case("interleaved", "zero3", {"dp": 4, "ep": 2}),
    Case("zb-v", "parameter-server", {"dp": 4, "ep": 2}),
    Case("zb-v", "zero3", {"dp": 4, "ep": 4}, BY_MICROBATCH),
    Case("zb-h1", "zero2", {"dp": 4, "ep": 2}, BY_MICROBATCH),
    Case("zb-h1", "zero1", {"dp": 4, "ep": 4}, {"layout": "parameters"}),
    Case("dualpipev", "zero3", {"dp": 2, "ep": 2}, {"granularity": "chunk"}),
    Case("dualpipev", "ddp", {"dp": 4, "ep": 4}),
    Case("chimera", "zero1", {"dp": 2, "ep": 2}, {"bucket_bytes": 0}),
    Case("gpipe", "parameter-server", {"dp": 2, "ep": 2}),
    Case("1f1b", "zero3", {"dp": 4, "ep": 2}, {"layout": "parameters"}),
    Case("1f1b", "zero3", {"dp": 4, "ep": 2}, BY_MICROBATCH),
    Case("1f1b", "zero2", {"dp": 2, "ep": 2, "tp": 2}),
    Case("zb-h1", "ddp", {"dp": 2, "ep": 2, "tp": 2}),
]


class Found(NamedTuple):
    """Losses and norms by step, and the values of the uncut model after them."""

    steps: list[tuple[float, float]]
    values: dict[str, Tensor]


def train(pipe: pl.Pipeline, *, first: bool = False, steps: int = 2) -> Found:
    """`first`: decay more, which a parameter without a gradient does not."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02, weight_decay=0.5 if first else 0.01)
    stepper = pl.BarrierStep(pipe, optimizer, max_norm=0.3)
    found = [update for step in range(steps) for update in stepper.step(*own_batch(pipe.mesh, step))]
    assert all(update.applied for update in found)
    values = {name: value.detach().clone() for name, value in pipe.state_dict().items()}
    return Found([(float(each.loss), float(each.grad_norm)) for each in found], values)


@cache
def alone(schedule: str, *, ranks: int = 2) -> Found:
    with pipeline(schedule=schedule, ranks=ranks) as pipe:
        return train(pipe)


def compare(found: list[Found], wanted: Found) -> None:
    for each in found:
        for row, other in zip(each.steps, wanted.steps, strict=True):
            assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(row, other, strict=True))
        for name, value in each.values.items():
            assert torch.allclose(value, wanted.values[name], rtol=1e-11, atol=1e-12), name
    assert {name for each in found for name in each.values} == wanted.values.keys()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_updates_are_those_of_one_process(case: Case) -> None:
    wanted = alone(case.schedule)
    assert min(norm for _, norm in wanted.steps) > 0.3, "every step is clipped"

    def work(mesh: pl.Mesh) -> Found:
        with pipeline(mesh, case.schedule, data=pl.DataParallel(case.strategy, **(case.options or {}))) as pipe:
            return train(pipe)

    compare(on_mesh(work, pp=2, **case.degrees), wanted)


@pytest.mark.whole_grid
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v", "zb-h1", "dualpipev", "chimera"])
@pytest.mark.parametrize("strategy", list(DataStrategy))
def test_every_combination_updates_as_one_process(schedule: str, strategy: str) -> None:
    """With all degrees and granularities, in float64 and in bf16."""
    granularities = ("step", "chunk", "microbatch") if DataStrategy(strategy).shards_gradients else ("step",)
    for degrees in ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2}):
        for granularity in granularities:
            options = {"granularity": granularity, "bucket_bytes": 0}
            test_updates_are_those_of_one_process(Case(schedule, strategy, degrees, options))
            data = pl.DataParallel(strategy, **options)
            wanted = in_bf16(None, schedule, None)
            for found in on_mesh(lambda mesh, data=data: in_bf16(mesh, schedule, data), pp=2, **degrees):
                assert found == pytest.approx(wanted, rel=1e-2), (degrees, granularity)


def in_bf16(mesh: pl.Mesh | None, schedule: str, data: Any) -> list[float]:
    with pipeline(mesh, schedule, dtype=torch.float32, precision="bf16", data=data) as pipe:
        stepper = pl.BarrierStep(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.005), max_norm=0.3)
        found = [u for step in range(3) for u in stepper.step(*own_batch(mesh, step, torch.float32))]
        return [number for update in found for number in (float(update.loss), float(update.grad_norm))]


def in_process(rank: int, strategy: str, degrees: dict[str, int]) -> tuple[Any, Any]:
    with pl.Mesh(**degrees) as mesh, pipeline(mesh, ranks=degrees["pp"], data=strategy) as pipe:
        steps, values = train(pipe)
        return steps, {name: value.numpy() for name, value in values.items()}


@pytest.mark.parametrize(
    ("strategy", "degrees"), [("zero3", {"pp": 1, "dp": 4, "ep": 2}), ("ddp", {"pp": 2, "dp": 2, "ep": 2})]
)
def test_processes_find_the_same(strategy: str, degrees: dict[str, int]) -> None:
    wanted = alone("1f1b", ranks=degrees["pp"])
    found = run_ranks(in_process, 4, strategy, degrees)
    compare([Found(steps, {n: torch.from_numpy(v) for n, v in values.items()}) for steps, values in found], wanted)


@pytest.mark.parametrize(("strategy", "degrees"), [("ddp", {"dp": 4, "ep": 2}), ("zero1", {"dp": 2, "ep": 2})])
def test_experts_without_a_gradient_here_have_one_if_others_have(strategy: str, degrees: dict[str, int]) -> None:
    """As in one process, where the gradient of rows that no forward reads is zero: they decay."""

    def work(mesh: pl.Mesh) -> Found:
        data = pl.DataParallel(strategy, bucket_bytes=0)
        with pipeline(mesh, has_first=True, stages=4, data=data) as pipe:
            return train(pipe, first=True)

    with pipeline(has_first=True, stages=4) as pipe:
        wanted = train(pipe, first=True)
    compare(on_mesh(work, pp=2, **degrees), wanted)


def test_experts_summed_over_all_replicas_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaGroups, "of", lambda groups, _: groups.every)
    with pytest.raises(AssertionError):
        test_updates_are_those_of_one_process(Case("1f1b", "ddp", {"dp": 4, "ep": 2}))


@pytest.mark.parametrize("only_first_replica", [False, True])
def test_norms_that_count_experts_wrongly_are_noticed(
    monkeypatch: pytest.MonkeyPatch, only_first_replica: bool
) -> None:
    """Counting experts on replica 0 alone leaves some out; counting them everywhere counts some twice."""

    def counts(sharing: DataSharing, parameter: nn.Parameter) -> bool:
        return sharing.replica == 0 or (not only_first_replica and is_expert(parameter))

    monkeypatch.setattr(DataSharing, "counts", counts)
    with pytest.raises(AssertionError):
        test_updates_are_those_of_one_process(Case("1f1b", "ddp", {"dp": 4, "ep": 2}))


FORMATS = [
    ("bf16", "zero1", {"dp": 2, "ep": 2}, False),
    ("bf16", "zero3", {"dp": 4, "ep": 2}, True),
    ("fp16", "zero2", {"dp": 4, "ep": 2}, False),
    ("fp32", "zero3", {"dp": 2, "ep": 2}, True),
]


@pytest.mark.parametrize(("precision", "strategy", "degrees", "offloads"), FORMATS)
def test_number_formats_and_offload(
    precision: str, strategy: str, degrees: dict[str, int], offloads: bool, tmp_path: Path
) -> None:
    where = f"disk:{tmp_path}" if offloads else None

    def steps(mesh: pl.Mesh | None, **options: Any) -> list[float]:
        with pipeline(mesh, dtype=torch.float32, precision=precision, **options) as pipe:
            optimizer: Any = torch.optim.AdamW(pipe.parameters(), lr=0.005)
            if mesh is not None and where is not None:
                optimizer = pl.OffloadedOptimizer(optimizer, where)
            scaler = pl.LossScaler(2.0**10) if precision == "fp16" else None
            stepper = pl.BarrierStep(pipe, optimizer, max_norm=0.3, scaler=scaler)
            found = [u for step in range(3) for u in stepper.step(*own_batch(mesh, step, torch.float32))]
            return [number for update in found for number in (float(update.loss), float(update.grad_norm))]

    wanted = steps(None)
    tolerance = 1e-6 if precision == "fp32" else 1e-3
    for found in on_mesh(lambda mesh: steps(mesh, data=pl.DataParallel(strategy, offload=where)), pp=2, **degrees):
        assert found == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_an_overflow_of_one_member_skips_the_update_everywhere(strategy: str) -> None:
    def work(mesh: pl.Mesh) -> bool:
        with pipeline(mesh, dtype=torch.float32, data=strategy, precision="fp16") as pipe:
            if mesh.coordinate("ep") == 1 and mesh.coordinate("pp") == 1:
                (module,) = pipe.modules()
                experts = next(p for p in module.parameters() if is_expert(p))
                experts.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
            before = {name: value.clone() for name, value in pipe.state_dict().items()}
            optimizer, scaler = torch.optim.AdamW(pipe.parameters(), lr=0.02), pl.LossScaler(2.0**8)
            stepper = pl.BarrierStep(pipe, optimizer, scaler=scaler)
            (update,) = stepper.step(*own_batch(mesh, 0, torch.float32))
            after = pipe.state_dict()
            same = all(torch.equal(value, after[name]) for name, value in before.items())
            return update.skipped and not update.applied and scaler.scale == 2.0**7 and same

    assert all(on_mesh(work, pp=2, dp=4, ep=2))


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_state_dicts_are_of_the_uncut_model(strategy: str) -> None:
    model = {name: value.clone() for name, value in build().state_dict().items()}
    shapes = {tuple(value.shape) for value in model.values()}
    assert {(EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER)} <= shapes

    def work(mesh: pl.Mesh) -> bool:
        with pipeline(mesh, data=strategy) as pipe:
            assert all(torch.equal(value, model[name]) for name, value in pipe.state_dict().items())
            other = {name: value + 1 for name, value in model.items()}
            pipe.load_state_dict(other)
            return all(torch.equal(value, other[name]) for name, value in pipe.state_dict().items())

    assert all(on_mesh(work, pp=2, dp=4, ep=2))


def test_replicas_start_from_the_first_with_the_same_experts() -> None:
    def work(mesh: pl.Mesh) -> dict[str, Tensor]:
        model = build(mesh)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(mesh.coordinate("dp"))
        schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
        with pl.Pipeline(model, schedule, mesh=mesh) as pipe:
            return {name: value.clone() for name, value in pipe.state_dict().items()}

    model = build().state_dict()
    for found in on_mesh(work, pp=2, dp=4, ep=2):
        for name, value in found.items():
            added = torch.zeros_like(value)
            if value.dim() == 3:
                added[EXPERTS // 2 :] = 1  # those of process 1 along ep, whose first replica is number 1
            assert torch.equal(value, model[name] + added), name


@pytest.mark.parametrize("sharded", [False, True])
def test_muon_makes_every_expert_orthogonal(sharded: bool) -> None:
    """Equal gradients give the updates of torch's Muon on each expert, in any layout."""

    def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def updated(pipe: pl.Pipeline, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> dict[str, Tensor]:
        held = {name: p for name, p in pipe.named_parameters() if p.dim() > 1 and p.numel()}
        optimizer = make(list(held.values()))
        for step in range(3):
            for name, parameter in held.items():
                block = placed_block(parameter)
                full = gradient(name, tuple(parameter.shape) if block is None else block.full_shape, step)
                parameter.grad = full if block is None else block.cut(full)
            pl.update_parameters(optimizer)
        return pipe.state_dict()

    wanted = {name: value.clone() for name, value in build().state_dict().items()}
    for name, value in wanted.items():
        if value.dim() > 1:
            matrices = [nn.Parameter(m.clone()) for m in (value if value.dim() == 3 else [value])]
            optimizer = torch.optim.Muon(matrices, lr=0.05)
            for step in range(3):
                full = gradient(name, tuple(value.shape), step)
                for matrix, part in zip(matrices, full if value.dim() == 3 else [full], strict=True):
                    matrix.grad = part
                optimizer.step()
            value.copy_(torch.stack([matrix.detach() for matrix in matrices]).view(value.shape))

    def work(mesh: pl.Mesh | None) -> dict[str, Tensor]:
        data = pl.DataParallel("zero1", layout="parameters") if sharded else None
        with pipeline(mesh, data=data) as pipe:
            return updated(pipe, lambda held: pl.Muon(held, pipeline=pipe, lr=0.05))

    degrees = {"dp": 4, "ep": 2} if sharded else {"dp": 2, "ep": 2, "tp": 2}
    for held in (work(None), *on_mesh(work, pp=2, **degrees)):
        assert all(torch.allclose(value, wanted[name], rtol=1e-12, atol=1e-12) for name, value in held.items())


def test_bytes_held_are_those_of_own_experts() -> None:
    def held(mesh: pl.Mesh, strategy: str) -> list[int]:
        with pipeline(mesh, data=pl.DataParallel(strategy, bucket_bytes=0)) as pipe:
            pipe.step(*own_batch(mesh))
            (store,) = pipe.state.stores.values()
            return [*store.held_bytes(), store.peak_bytes().gathered]

    def number(mesh: pl.Mesh, segments: int, kind: Callable[[nn.Parameter], bool]) -> int:
        """Bytes of a stage's parameters, each in a unit of this number of segments."""
        sizes = [p.numel() for p in build(mesh, stages=1).parameters() if kind(p)]
        return 8 * sum(16 * segments * math.ceil(math.ceil(size / 16) / segments) for size in sizes)

    def work(mesh: pl.Mesh) -> bool:
        dp, replicas = mesh.degree("dp"), mesh.degree("edp")
        dense, experts = number(mesh, dp, lambda p: not is_expert(p)), number(mesh, 1, is_expert)
        assert experts == 8 * EXPERTS // 2 * 2 * INNER * WIDTH
        for strategy in ("ddp", "zero1", "zero3"):
            parameters, masters, gradients, gathered = held(mesh, strategy)
            if strategy == "zero3":
                # Without other replicas, experts are neither copied nor freed.
                assert parameters == pytest.approx(0 if replicas > 1 else experts, abs=64)
                assert masters == dense / dp + (experts / replicas if replicas > 1 else 0)
                assert gathered == dense + (experts if replicas > 1 else 0)
            else:
                assert masters == gathered == 0
                assert experts + 8 * WIDTH * (WIDTH + 1 + EXPERTS) <= parameters <= experts + dense
            least = experts if strategy == "ddp" else experts / replicas
            assert least <= gradients <= least + (dense if strategy == "ddp" else dense / dp), strategy
        return True

    assert all(on_mesh(work, pp=2, dp=2, ep=2))
    assert all(on_mesh(work, pp=2, dp=4, ep=2))
