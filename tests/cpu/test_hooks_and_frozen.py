"""Hooks on parameters of which ranks hold copies, ranks with nothing to train, and schedules that train nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.errors import ScheduleError
from tests.cpu.pairwise import of_grid
from tests.cpu.reference import accumulate, make_mlp

mse = nn.functional.mse_loss
INPUTS, TARGETS = torch.randn(2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("name", "transport", "tied"), of_grid(["chimera", "dualpipe", "zb-h1"], ["loopback", "threads"], [False, True])
)
def test_hooks_on_parameters_are_on_their_copies_too(name: str, transport: str, tied: bool) -> None:
    calls = []

    def make() -> nn.Module:
        model = make_mlp(4, dtype=torch.float64)
        if tied:
            model[3][0].weight = model[0][0].weight
        model[0][0].weight.register_hook(lambda gradient: gradient * 3)
        model[0][0].weight.register_post_accumulate_grad_hook(calls.append)
        return model

    reference, model = make(), make()
    accumulate(reference, mse, INPUTS, TARGETS, 8)
    assert len(calls) == 8
    calls.clear()
    schedule = pl.schedules.build(name, num_ranks=4 if name == "zb-h1" else 2, num_microbatches=8)
    with pl.Pipeline(model, schedule, loss_fn=mse, transport=transport) as pipe:
        pipe.step(INPUTS, TARGETS)
        expected = dict(reference.named_parameters())
        for label, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[label].grad, rtol=1e-12, atol=1e-15)
        holders = {id(parameter) for label, parameter in pipe.named_parameters() if label == "0.0.weight"}
        assert {id(parameter) for parameter in calls} >= holders
        assert len({id(parameter) for parameter in calls}) == (2 if tied or name != "zb-h1" else 1)


@pytest.mark.parametrize("first", ["frozen", "none"])
def test_a_rank_may_have_nothing_to_train(first: str) -> None:
    trained = []
    for kind in (pl.BarrierStep, pl.PostValidatedStep):
        model = make_mlp(2, dtype=torch.float64)
        model[0] = model[0].requires_grad_(False) if first == "frozen" else nn.Tanh()
        schedule = pl.schedules.zb_h1(num_ranks=2, num_microbatches=4)
        with pl.Pipeline(model, schedule, loss_fn=mse, transport="threads") as pipe:
            trainable = [parameter for parameter in pipe.parameters() if parameter.requires_grad]
            stepper = kind(pipe, torch.optim.AdamW(trainable, lr=0.1), max_norm=0.01)
            updates = [update for _ in range(3) for update in stepper.step(INPUTS, TARGETS)] + stepper.settle()
            trained.append([float(update.loss) for update in updates] + [p.tolist() for p in pipe.parameters()])
    assert len(trained[0]) > 3
    assert trained[0] == trained[1]


def half_frozen(depth: int) -> nn.Sequential:
    """A chain whose first block is frozen; of the others, the weights."""
    model = make_mlp(depth, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias") and not name.startswith("0."))
    return model


@pytest.mark.parametrize("name", pl.schedules.SYNCHRONOUS)
def test_frozen_parameters_have_no_gradients_in_any_schedule(name: str) -> None:
    schedule = pl.schedules.build(name, num_ranks=2, num_microbatches=4)
    if schedule.num_slices > 1:
        pytest.skip("slices cut sequences")
    reference, model = (half_frozen(schedule.num_stages) for _ in range(2))
    loss = accumulate(reference, mse, INPUTS, TARGETS, schedule.num_microbatches)
    with pl.Pipeline(model, schedule, loss_fn=mse, recompute="full") as pipe:
        torch.testing.assert_close(pipe.step(INPUTS, TARGETS), loss, rtol=1e-12, atol=0)
        expected = dict(reference.named_parameters())
        for label, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[label].grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_frozen_parameters_stay_as_they_are_in_every_data_strategy(strategy: str) -> None:
    reference = half_frozen(4)
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        accumulate(reference, mse, INPUTS, TARGETS, 2)
        optimizer.step()

    def train() -> dict[str, torch.Tensor]:
        mesh = pl.Mesh(pp=2, dp=2)
        schedule = pl.schedules.zb_v(num_ranks=2, num_microbatches=4)
        own = slice(4 * mesh.coordinate("dp"), 4 * mesh.coordinate("dp") + 4)
        with pl.Pipeline(half_frozen(4), schedule, loss_fn=mse, mesh=mesh, data=strategy) as pipe:
            trained = torch.optim.AdamW([p for p in pipe.parameters() if p.requires_grad], lr=0.1)
            for _ in range(2):
                trained.zero_grad()
                pipe.step(INPUTS[own], TARGETS[own])
                trained.step()
            return pipe.state_dict()

    for state in pl.run_threads(4, train, timeout_seconds=60.0):
        for name, value in state.items():
            frozen = not name.endswith("bias") or name.startswith("0.")
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-9, atol=1e-12)
            assert torch.equal(value, before[name]) is frozen


def test_forwards_alone_evaluate_and_train_nothing(tmp_path, capsys) -> None:
    orders = "0F0 0F1\n1F0 1F1"
    with pl.Pipeline(make_mlp(2), pl.schedules.from_orders(orders, name="mine"), loss_fn=mse) as pipe:
        inputs, targets = INPUTS.float(), TARGETS.float()
        with pytest.raises(ScheduleError, match=r"'mine' has only forwards: training needs all backwards, such as 1B0"):
            pipe.step(inputs, targets)
        # Of halves of the batch: which bits that gives depends on the processor.
        torch.testing.assert_close(pipe.forward(inputs), make_mlp(2)(inputs).detach())
        torch.testing.assert_close(pipe.evaluate(inputs, targets), mse(make_mlp(2)(inputs), targets))
    (tmp_path / "mine.csv").write_text(orders.replace(" ", ","))
    words = [
        "--schedule",
        str(tmp_path / "mine.csv"),
        "--batch.microbatches",
        "2",
        "--output_dir",
        str(tmp_path / "out"),
    ]
    assert main(["train", *words]) == 2
    assert "has only forwards: training needs all backwards, such as 1B0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
