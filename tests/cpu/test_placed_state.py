"""What is outside the layers reads `Placed` alone: gradients, norms, values and updates equal those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.parallel.placed import Placed, even, place_parameter, placed_block
from tests.cpu.pairwise import fewer, in_turn
from tests.cpu.placed_model import build, on_mesh, own_batch, pipeline

LAYOUTS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "tp": ({"pp": 2, "tp": 2}, {}),
    "ddp": ({"pp": 2, "tp": 2, "dp": 2}, {}),
    "zero1": ({"pp": 2, "tp": 2, "dp": 2}, {"data": "zero1"}),
    "zero2": ({"pp": 2, "tp": 2, "dp": 2}, {"data": "zero2"}),
    "zero3": ({"pp": 2, "tp": 2, "dp": 2}, {"data": "zero3"}),
    "server": ({"pp": 2, "tp": 2, "dp": 2}, {"data": "parameter-server"}),
}


def full_gradients(pipe: pl.Pipeline) -> dict[str, Tensor]:
    """Gradients by name, of what this process owns; zeros elsewhere, so that sums over processes are the gradients."""
    state, found = pipe.state, {}
    for name, parameter in pipe.named_parameters():
        block, span = placed_block(parameter), state.ranges.get(name)
        gradient = parameter.grad
        assert gradient is not None or not parameter.numel()
        shape = tuple(parameter.shape) if span is None else span.shape
        local = torch.zeros(shape, dtype=torch.float64)
        if gradient is not None:
            flat = local.view(-1)
            first = 0 if span is None else span.start
            flat[first : first + gradient.numel()] = gradient.reshape(-1)
        counts = state.sharing.sharded or state.sharing.replica == 0
        if block is None:
            first_of_stage = pipe.mesh is None or pipe.mesh.coordinate("tp") == 0
            found[name] = local if counts and first_of_stage else torch.zeros_like(local)
        else:
            full = torch.zeros(block.full_shape, dtype=torch.float64)
            if counts:
                block.how.join(local, block.place, full, owned_only=True)
            found[name] = full
    return found


def summed(found: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for each in found:
        for name, value in each.items():
            total[name] = total[name] + value if name in total else value.clone()
    return total


def close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("degrees", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_and_norms_are_those_of_one_process(degrees: dict[str, int], options: dict[str, str]) -> None:
    with pipeline() as pipe:
        for step in range(2):  # adds up
            loss = pipe.step(*own_batch(pipe, step))
        wanted = full_gradients(pipe)
        norm = pl.clip_grad_norm(pipe, 0.5)
        clipped = full_gradients(pipe)
    names = list(wanted)

    def work(mesh: pl.Mesh) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
        with pipeline(mesh, **options) as pipe:
            for step in range(2):
                loss = pipe.step(*own_batch(pipe, step))
            gradients = {name: value.clone() for name, value in full_gradients(pipe).items()}
            return loss, gradients, pl.clip_grad_norm(pipe, 0.5), full_gradients(pipe)

    found = on_mesh(work, **degrees)
    total, total_clipped = summed([each[1] for each in found]), summed([each[3] for each in found])
    assert sorted(total) == sorted(names)
    for name in names:
        assert close(total[name], wanted[name]), name
        assert close(total_clipped[name], clipped[name]), name
    assert norm > 0.5
    for found_loss, _, found_norm, _ in found:
        assert close(found_loss, loss)
        assert torch.equal(found_norm, found[0][2])
        assert close(found_norm, norm)


def test_gradients_that_several_processes_hold_are_equal_bits() -> None:
    def work(mesh: pl.Mesh) -> list[Tensor]:
        with pipeline(mesh) as pipe:
            pipe.step(*own_batch(pipe))
            named = {name: p.grad for name, p in pipe.named_parameters()}
            return [
                value[-4:] if name.endswith("fused") else value
                for name, value in sorted(named.items())
                if value is not None and name.rpartition(".")[2] in ("fused", "gain", "bias")
            ]

    found = on_mesh(work, pp=2, tp=2)
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(a, b) for a, b in zip(found[one], found[other], strict=True))


@pytest.mark.parametrize("updates", fewer(2, 5))
@pytest.mark.parametrize(("layout", "schedule"), in_turn(LAYOUTS, ["1f1b", "zb-h1"]))
def test_updates_are_those_of_one_process(updates: int, layout: str, schedule: str) -> None:
    degrees, options = LAYOUTS[layout]

    def train(pipe: pl.Pipeline) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.02)
        stepper = pl.BarrierStep(pipe, optimizer, max_norm=0.5)
        losses = []
        for step in range(updates):
            losses += [float(update.loss) for update in stepper.step(*own_batch(pipe, step))]
        return losses, {name: value.clone() for name, value in pipe.state_dict().items()}

    with pipeline(schedule=schedule) as pipe:
        losses, wanted = train(pipe)

    def work(mesh: pl.Mesh) -> tuple[list[float], dict[str, Tensor]]:
        with pipeline(mesh, schedule, **options) as pipe:
            return train(pipe)

    found = on_mesh(work, **degrees)
    for each_losses, values in found:
        assert all(math.isclose(a, b, rel_tol=1e-11) for a, b in zip(each_losses, losses, strict=True))
        for name, value in values.items():
            assert torch.allclose(value, wanted[name], rtol=1e-9, atol=1e-10), name
    assert {name for _, values in found for name in values} == wanted.keys()


@pytest.mark.parametrize(("degrees", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_state_dicts_are_of_the_full_model(degrees: dict[str, int], options: dict[str, str]) -> None:
    model = {name: value.clone() for stage in build() for name, value in stage.state_dict().items()}

    def work(mesh: pl.Mesh) -> bool:
        with pipeline(mesh, **options) as pipe:
            held = pipe.state_dict()
            assert all(torch.equal(value, model[name]) for name, value in held.items())
            other = {name: value + 1 for name, value in model.items()}
            pipe.load_state_dict(other)
            assert all(torch.equal(value, other[name]) for name, value in pipe.state_dict().items())
            padding = [p for name, p in pipe.named_parameters() if name == "0.weight" and p.dim() == 2]
            if padding and mesh.coordinate("tp") == 1:
                assert not padding[0].detach()[2].any()
            with pytest.raises(InputError, match=r"has shape \(6, 4\) in the state: the model's has shape \(6, 8\)"):
                pipe.load_state_dict({n: v[:, :4] if n.endswith("down") else v for n, v in other.items()})
            return True

    assert all(on_mesh(work, **degrees))


def test_a_skipped_sum_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeloom.parallel.mesh_blocks import MeshBlocks

    monkeypatch.setattr(MeshBlocks, "gradient_sum", lambda *_: None)
    with pytest.raises(AssertionError):
        test_gradients_and_norms_are_those_of_one_process({"pp": 2, "tp": 2}, {})


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream-2bw"])
def test_streams_update_as_one_process(schedule: str) -> None:
    def train(pipe: pl.Pipeline) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        stream = pl.Stream(pipe, torch.optim.AdamW(pipe.parameters(), lr=0.02), max_norm=0.3)
        updates = stream.run([own_batch(pipe, step) for step in range(6)])
        updates += stream.run([own_batch(pipe, step) for step in range(6, 8)])
        return [(update.loss, update.grad_norm) for update in updates], pipe.state_dict()

    with pipeline(schedule=schedule) as pipe:
        wanted, values = train(pipe)

    def work(mesh: pl.Mesh) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        with pipeline(mesh, schedule) as pipe:
            return train(pipe)

    for found, held in on_mesh(work, pp=2, tp=2):
        assert torch.allclose(torch.tensor(found), torch.tensor(wanted), rtol=1e-10)
        assert all(torch.allclose(value, values[name], rtol=1e-9, atol=1e-10) for name, value in held.items())


def test_collectives_lie_inside_the_actions_of_a_run() -> None:
    def work(mesh: pl.Mesh) -> bool:
        with pipeline(mesh) as pipe:
            for step in range(2):  # only the last run counts
                pipe.step(*own_batch(pipe, step))
            ((rank, spans),), ((same, rows),) = pipe.collectives, pipe.records
            assert rank == same == pipe.rank
            assert {span.axis for span in spans} == {"tp"}
            last = max(end for _, _, end in rows)
            actions = [row for row in rows if row[0].op in pl.ir.COMPUTE_OPS]
            for span in spans:
                within = [action for action, start, end in actions if start <= span.start and span.end <= end]
                assert len(within) == 1 or span.start > last, "sums of gradients come last"
            forwards = [row for row in actions if row[0].op is pl.Op.F]
            held = [sum(start <= span.start <= end for span in spans) for _, start, end in forwards]
            assert len(set(held)) == 1
            assert held[0] > 0
            pipe.evaluate(*own_batch(pipe, 0))
            ((_, evaluated),) = pipe.collectives
            assert 0 < len(evaluated) < len(spans)
            return True

    assert all(on_mesh(work, pp=2, tp=2))


@pytest.mark.parametrize("sharded", [False, True])
def test_muon_makes_full_matrices_orthogonal(sharded: bool) -> None:
    """Equal gradients give the updates of torch's Muon on one process, for any layout of a matrix."""

    def gradient(name: str, shape: tuple[int, ...], step: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()) + 1000 * step)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def train(pipe: pl.Pipeline, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> dict[str, Tensor]:
        matrices = {name: p for name, p in pipe.named_parameters() if p.dim() == 2 and p.numel()}
        optimizer = make(list(matrices.values()))
        for step in range(3):
            for name, parameter in matrices.items():
                block = placed_block(parameter)
                shape = tuple(parameter.shape) if block is None else block.full_shape
                parameter.grad = (
                    gradient(name, shape, step) if block is None else block.cut(gradient(name, shape, step))
                )
            pl.update_parameters(optimizer)
        return pipe.state_dict()

    with pipeline() as pipe:
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        wanted = train(pipe, lambda matrices: torch.optim.Muon(matrices, lr=0.05))
    assert any(not torch.equal(value, before[name]) for name, value in wanted.items())

    def work(mesh: pl.Mesh) -> dict[str, Tensor]:
        data = pl.DataParallel("zero1", layout="parameters") if sharded else None
        with pipeline(mesh, data=data) as pipe:
            return train(pipe, lambda matrices: pl.Muon(matrices, pipeline=pipe, lr=0.05))

    for held in on_mesh(work, pp=2, tp=2, **({"dp": 2} if sharded else {})):
        assert all(torch.allclose(value, wanted[name], rtol=1e-12, atol=1e-12) for name, value in held.items())


def test_what_needs_full_parameters_or_cancelled_forwards_is_refused() -> None:
    def work(mesh: pl.Mesh) -> bool:
        with pipeline(mesh) as pipe:
            with pytest.raises(InputError, match=r"Adafactor cannot update blocks of parameters, which mesh axis tp"):
                pl.BarrierStep(pipe, torch.optim.Adafactor(pipe.parameters()))
            whole = [p for name, p in pipe.named_parameters() if name.endswith(("gain", "bias"))]
            pl.BarrierStep(pipe, torch.optim.Adafactor(whole))
            with pytest.raises(InputError, match=r"PostValidatedStep does not support tensor parallelism"):
                pl.PostValidatedStep(pipe, torch.optim.SGD(pipe.parameters(), lr=0.1))
            return True

    assert all(on_mesh(work, pp=2, tp=2))


def test_shards_need_blocks_of_one_shape() -> None:
    def work(mesh: pl.Mesh) -> bool:
        model = [torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(2, 2, bias=False)]
        for layer, rows in zip(model, (5, 5), strict=True):
            how = Placed((rows, layer.in_features), {0: even(rows, 2, ("tp",))})
            layer.weight = torch.nn.Parameter(torch.zeros(how.local_shape(mesh.place)))
            place_parameter(layer.weight, how, mesh.place)
        schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
        with pytest.raises(InputError, match=r"weight' lies in blocks of shapes \[2, \d\] and \[3, \d\]"):
            pl.Pipeline(model, schedule, mesh=mesh, data="zero1", transport="auto")
        return True

    assert on_mesh(work, pp=2, tp=2, dp=2)
