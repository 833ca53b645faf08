"""Layers of experts on several processes: against one process, along both kinds of replicas, and what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.models.experts import Experts
from pipeloom.parallel.placed import placed_block
from tests.cpu.inside_stage import compare_gradients


class Residual(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.layer = Experts(6, expert_width=8, **{"experts": 4, **settings})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x)


def make_model(**settings: Any) -> Residual:
    model = Residual(**settings).double()
    init_parameters(model, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    return model


def check_layer(*, dp: int, ep: int, tp: int = 1, exchange: str = "counts", **settings: Any) -> None:
    """Outputs and input gradients of every process, and the sum of its parts of the parameters' gradients."""
    base = make_model(**settings)
    generator = torch.Generator().manual_seed(0)
    x, probe = torch.randn(2, dp, 3, 4, 6, dtype=torch.float64, generator=generator)
    wanted, inputs = copy.deepcopy(base), x.clone().requires_grad_()
    outputs = [wanted(each) for each in inputs]
    sum((output * each).sum() for output, each in zip(outputs, probe, strict=True)).backward()

    def work() -> dict[str, torch.Tensor]:
        with pl.Mesh(dp=dp, tp=tp, ep=ep) as mesh:
            model, replica = copy.deepcopy(base), mesh.coordinate("dp")
            pl.parallelize(model, mesh, {"layer": "experts"}, exchange=exchange)
            own = x[replica].clone().requires_grad_()
            output = model(own)
            (output * probe[replica]).sum().backward()
            torch.testing.assert_close(output, outputs[replica], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own.grad, inputs.grad[replica], rtol=1e-12, atol=1e-12)
            found = {}
            for name, parameter in model.named_parameters():
                block = placed_block(parameter)
                assert parameter.grad is not None, name
                if block is None:
                    found[name] = parameter.grad if mesh.coordinate("tp") == 0 else torch.zeros_like(parameter)
                    continue
                found[name] = torch.zeros(block.full_shape, dtype=torch.float64)
                block.how.join(parameter.grad, block.place, found[name])
            return found

    parts = pl.run_threads(dp * tp, work, timeout_seconds=60)
    for name, parameter in wanted.named_parameters():
        torch.testing.assert_close(sum(part[name] for part in parts), parameter.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "degrees", [{"dp": 1, "ep": 1, "tp": 2}, {"dp": 4, "ep": 2}, {"dp": 2, "ep": 2, "tp": 2}], ids=str
)
@pytest.mark.parametrize("gated", [False, True])
def test_a_layer_on_several_processes(degrees: dict[str, int], gated: bool) -> None:
    check_layer(**degrees, gated=gated, shared_experts=2)


@pytest.mark.parametrize("capacity_by", ["batch", "sequence"])
@pytest.mark.parametrize("exchange", ["counts", "capacity"])
def test_both_exchanges_drop_the_same_tokens(exchange: str, capacity_by: str) -> None:
    check_layer(dp=4, ep=4, exchange=exchange, capacity_factor=0.6, capacity_by=capacity_by)


def test_experts_of_a_process_may_get_no_token() -> None:
    """And a process may have no row to send."""

    def work() -> list[float]:
        with pl.Mesh(dp=2, ep=2) as mesh:
            model = make_model(top_k=1)
            with torch.no_grad():
                model.layer.router.weight.zero_()
                model.layer.router.weight[0] = 1.0
            pl.parallelize(model, mesh)
            model(torch.ones(1, 3 * mesh.coordinate("dp"), 6, dtype=torch.float64)).sum().backward()
            assert model.layer.up.grad is not None
            return model.layer.up.grad.abs().sum((1, 2)).tolist()

    first, second = pl.run_threads(2, work, timeout_seconds=60)
    assert first[0] > 0
    assert first[1] == 0
    assert second == [0, 0]


@pytest.mark.parametrize(
    ("degrees", "axes", "width"),
    [
        ({"cp": 2, "ep": 2}, ("cp",), 2),
        ({"dp": 2, "cp": 2, "ep": 4}, ("dp", "cp"), 1),
        ({"dp": 2, "cp": 2, "ep": 2}, ("cp",), 2),
    ],
    ids=str,
)
def test_context_parallel_ranks_share_experts(degrees: dict[str, int], axes: tuple[str, ...], width: int) -> None:
    """Every token is routed alone, so parts of sequences give what sequences give."""
    config = GPTConfig(vocabulary_size=13, layers=2, width=8, heads=2, sequence_length=8, experts=4, balance_weight=0.0)
    model = GPT(config).double()
    init_parameters(model, seed=3)
    rows = torch.randint(0, 13, (8, 9), generator=torch.Generator().manual_seed(1))
    tokens, targets = rows[:, :-1], rows[:, 1:]
    wanted = copy.deepcopy(model)
    expected = loss_fn(wanted(tokens), targets)
    expected.backward()
    size = degrees.get("dp", 1) * degrees["cp"]

    def work() -> None:
        with pl.Mesh(expert_axes=axes, **degrees) as mesh:
            own = pl.parallelize(copy.deepcopy(model), mesh)
            schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
            with pl.Pipeline(own, schedule, loss_fn=loss_fn, mesh=mesh, data="zero1", context="ring") as pipe:
                replica, dp = mesh.coordinate("dp"), mesh.degree("dp")
                loss = pipe.step(tokens.chunk(dp)[replica], targets.chunk(dp)[replica])
                assert abs(float(loss) - expected.item()) < 1e-12
                assert len(own.blocks[0].experts.up) == width
                compare_gradients(pipe, gradients, str(degrees))
                assert abs(float(pl.clip_grad_norm(pipe, 1e9)) - norm) < 1e-12 * norm

    gradients = {name: parameter.grad for name, parameter in wanted.named_parameters() if parameter.grad is not None}
    norm = nn.utils.clip_grad_norm_(wanted.parameters(), 1e9).item()
    pl.run_threads(size, work, timeout_seconds=60)


def _refused(size: int, degrees: dict[str, int], make: Any, **options: Any) -> str:
    """The message that every thread gets; the model is as it was."""

    def work() -> str:
        with pl.Mesh(**degrees) as mesh:
            model = make(mesh)
            names = [name for name, _ in model.named_parameters()]
            with pytest.raises(InputError) as caught:
                pl.parallelize(model, mesh, **options)
            assert [name for name, _ in model.named_parameters()] == names
            assert all(placed_block(parameter) is None for parameter in model.parameters())
            return str(caught.value)

    first, *others = pl.run_threads(size, work, timeout_seconds=60)
    assert "\n" not in first
    assert all("\n" not in other for other in others)
    return first


def test_degrees_of_1_leave_a_model_without_a_plan_as_it_is() -> None:
    def work() -> None:
        with pl.Mesh(dp=2) as mesh:
            model = nn.Sequential(nn.Linear(4, 4))
            assert pl.parallelize(model, mesh) is model
            assert placed_block(model[0].weight) is None

    pl.run_threads(2, work, timeout_seconds=60)


def test_experts_that_cannot_be_shared_are_refused_in_one_line() -> None:
    two = {"dp": 2, "ep": 2}
    assert "3 experts, which ep=2 processes cannot share evenly. Use ep=1 or 3." in _refused(
        2, two, lambda mesh: make_model(experts=3)
    )
    assert "the model has no experts" in _refused(2, two, lambda mesh: nn.Linear(2, 2))
    assert "'layer' have no capacity" in _refused(2, two, lambda mesh: make_model(), exchange="capacity")
    assert "must be one of counts, capacity" in _refused(2, two, lambda mesh: make_model(), exchange="all")
    assert "experts of width 8, which 3 tensor-parallel ranks cannot share evenly. Use tp=1, 2, 4 or 8." in _refused(
        3, {"tp": 3}, lambda mesh: make_model(), plan={"layer": "experts"}
    )
    assert "Linear has no experts" in _refused(
        2, {"tp": 2}, lambda mesh: nn.Sequential(nn.Linear(2, 2)), plan={"0": "experts"}
    )
    config = GPTConfig(vocabulary_size=16, layers=2, width=8, heads=2, sequence_length=8, experts=4)
    assert "layout '1d' alone can cut them" in _refused(4, {"tp": 4}, lambda mesh: GPT(config), layout="2d")


def test_other_weights_on_another_expert_parallel_rank_are_refused() -> None:
    def other(mesh: pl.Mesh) -> nn.Module:
        model = make_model()
        with torch.no_grad():
            model.layer.router.weight.add_(mesh.coordinate("ep"))
        return model

    message = _refused(2, {"dp": 2, "ep": 2}, other)
    assert "'layer.router.weight' has other values on expert-parallel rank 1 than on rank 0" in message


def test_a_model_that_is_not_cut_along_ep_is_refused() -> None:
    def work() -> None:
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
        with pl.Mesh(dp=2, ep=2) as mesh:
            with pytest.raises(InputError, match=r"no experts of the model are cut along ep.*parallelize"):
                pl.Pipeline(nn.Sequential(make_model()), schedule, loss_fn=nn.functional.mse_loss, mesh=mesh)
            cut = pl.parallelize(make_model(), mesh)
        with (
            pl.Mesh(dp=2) as mesh,
            pytest.raises(InputError, match=r"was cut for place ep [01] of 2, tp 0 of 1, and this mesh has ep 0 of 1"),
        ):
            pl.Pipeline(nn.Sequential(cut), schedule, loss_fn=nn.functional.mse_loss, mesh=mesh)

    pl.run_threads(2, work, timeout_seconds=60)


def test_a_rank_without_experts_may_have_placeholders() -> None:
    """Lists of stages, as ranks that build their own stage alone have them: the experts are on the other rank."""
    x = torch.randn(2, 4, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def work(own: bool) -> tuple[float, torch.Tensor]:
        with pl.Mesh(pp=2, dp=2, ep=2) as mesh:
            torch.manual_seed(0)
            experts, last = pl.parallelize(make_model(), mesh), nn.Linear(6, 6).double()
            with torch.no_grad():
                last.weight.copy_(torch.eye(6))
                last.bias.zero_()
            stages: list[nn.Module] = [experts, last]
            if own:
                stages[1 - mesh.coordinate("pp")] = nn.Identity()
            schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
            with pl.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh) as pipe:
                batch = x[mesh.coordinate("dp")]
                loss = pipe.step(batch, -batch).item()
                return loss, torch.cat([p.grad.flatten() for p in pipe.parameters() if p.grad is not None])

    for (loss, found), (wanted, gradients) in zip(
        *(pl.run_threads(4, lambda own=own: work(own), timeout_seconds=60) for own in (True, False)), strict=True
    ):
        assert loss == wanted
        assert torch.equal(found, gradients)


def test_placeholders_without_experts_on_any_rank_are_refused() -> None:
    def work() -> None:
        with pl.Mesh(pp=2, dp=2, ep=2) as mesh:
            stages = [nn.Identity(), nn.Identity()]
            stages[mesh.coordinate("pp")] = nn.Linear(6, 6)
            schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
            with pytest.raises(InputError, match="no experts of the model are cut along ep"):
                pl.Pipeline(stages, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh)

    pl.run_threads(4, work, timeout_seconds=60)
