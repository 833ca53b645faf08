"""Where the first value of a step is that is not finite, and steps that are finite the second time."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.cli import main
from pipeloom.models.gpt import Block
from pipeloom.training.nonfinite import NonFiniteSearch, _Consumers
from tests.cpu.pairwise import of_grid
from tests.cpu.train_runs import launched, metrics, printed, started, story, text, words  # noqa: F401


class Poison(torch.autograd.Function):
    """The identity, with nan in the forward, in the gradient of its input, or nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.backward = backward
        return x * float("nan") if forward else x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * float("nan") if ctx.backward else gradient, None, None


class Layer(nn.Module):
    """A linear layer that poisons samples whose first feature has a value."""

    def __init__(self, *, mark: float | None = None, forward: bool = False, backward: bool = False) -> None:
        super().__init__()
        self.linear, self.mark = nn.Linear(4, 4), mark
        self.poison = forward, backward

    def forward(self, x: Tensor) -> Tensor:
        marked = self.mark is not None and bool((x[:, 0] == self.mark).any())
        y = Poison.apply(x, self.poison[0] and marked, self.poison[1] and marked)
        return torch.cat([x[:, :1], self.linear(y)[:, 1:]], 1)


def found(model: nn.Module, schedule: pl.Schedule, inputs: Tensor, loss_fn: Any = None, **more: Any) -> str | None:
    loss = loss_fn or (lambda output, target: (output - target).square().mean())
    with pl.Pipeline(model, schedule, loss_fn=loss, **more) as pipe:
        search = NonFiniteSearch(pipe, lambda value: [value])
        search.begin()
        with search.searching() as findings:
            pipe.step(inputs, torch.zeros(len(inputs), 4))
        assert all(not hooked._forward_hooks and not hooked._forward_pre_hooks for hooked in model.modules())
        return search.first(findings, own_finite=False)[0]


SCHEDULES: list[Callable[[], pl.Schedule]] = [
    partial(pl.schedules.one_f_one_b, num_ranks=3, num_microbatches=4),
    partial(pl.schedules.zb_h1, num_ranks=3, num_microbatches=4),
]


@pytest.mark.parametrize(("make", "recompute", "backward"), of_grid(SCHEDULES, ["none", "full"], [False, True]))
def test_the_first_value_is_found_on_its_layer_stage_and_micro_batch(
    make: Callable[[], pl.Schedule], recompute: str, backward: bool
) -> None:
    torch.manual_seed(0)
    layers = [Layer(mark=2.0 if n == 3 else None, forward=not backward, backward=backward) for n in range(6)]
    inputs = torch.randn(8, 4)
    inputs[:, 0] = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    where = found(nn.Sequential(*layers), make(), inputs, recompute=recompute)
    assert where is not None
    if backward:
        assert where.startswith("the gradient of the input of layer 3, which has nan in 8 of 8 values, in the backward")
    else:
        assert where.startswith("the output of layer 3.linear, which has nan in 8 of 8 values, in the forward of")
    assert where.endswith(" of micro-batch 2 on stage 1, rank 1")


def test_parameters_losses_and_batches_are_named() -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    inputs = torch.randn(4, 4)
    assert found(model, schedule, inputs) is None
    where = found(model, schedule, inputs, lambda output, _: (output - output).sum().log())
    assert where is not None
    assert where.startswith("the loss, of finite outputs, which has inf in 1 of 1 values, in the forward of micro-")
    inputs[3, 2] = float("inf")
    where = found(model, schedule, inputs)
    assert where == (
        "the input of the stage, which has inf in 1 of 8 values, in the forward of micro-batch 1 on stage 0, rank 0"
    )
    with torch.no_grad():
        model[3].linear.weight[1, 2] = float("nan")  # type: ignore[union-attr, index]
    assert found(model, schedule, inputs) == "parameter 3.linear.weight itself, which has nan in 1 of 16 values"


def test_a_tensor_that_several_layers_read_names_what_is_around_them() -> None:
    tensor = torch.zeros(1)
    one, several = _Consumers(tensor, "blocks.3"), _Consumers(tensor, "blocks.3")
    one.add("blocks.3.norm")
    assert str(one) == "layer blocks.3.norm"
    for name in ("blocks.3.attention", "blocks.3.attention.q", "blocks.3.attention.k", "blocks.3.attention.v"):
        several.add(name)
    assert str(several) == "layer blocks.3.attention"


def faulty(rank: int, call: int, times: int) -> None:
    """In process `rank`, the forwards of a block give nan from a call on, so many times."""
    forward, calls = Block.forward, [0]

    def sometimes(self: Block, x: Any) -> Any:
        calls[0] += 1
        output = forward(self, x)
        bad = os.environ.get("RANK") == str(rank) and call <= calls[0] < call + times
        return output * float("nan") if bad else output

    Block.forward = sometimes  # type: ignore[method-assign]


SHORT = (
    "--steps=4", "--save_steps=4", "--eval_steps=0", "--sample_tokens=0", "--model.dropout=0.1",
    "--parallel.pipeline=1", "--parallel.data=2", "--batch.microbatches=2",
)  # fmt: skip
CALL = 2 * 4 * 2 + 6  # in the third step, the second micro-batch's second block of four


@pytest.mark.parametrize("retry", [False, True], ids=["stop", "retry"])
def test_a_step_that_is_finite_the_second_time_is_a_hardware_fault(
    text: Path,  # noqa: F811
    tmp_path: Path,
    retry: bool,
) -> None:
    out = tmp_path / "out"
    command = words(text, out, *SHORT, *(["--on_nonfinite=retry"] if retry else []))
    with started(command, first=partial(faulty, 1, CALL, 1)) as process:
        assert process.wait() == (0 if retry else 1)
        shown, errors = printed(process.stdout), printed(process.stderr)
    line = "loss nan and gradient norm nan, both finite when the step ran again: a hardware fault"
    if not retry:
        assert f"step 3 has {line}" in errors
        return
    assert f"step 3  {line}" in shown
    assert [row["step"] for row in metrics(out) if "hardware_fault" in row] == [3]
    reference = tmp_path / "reference"
    assert launched(words(text, reference, *SHORT)).returncode == 0
    assert story(out) == story(reference)


def test_a_fault_that_stays_is_named(text: Path, tmp_path: Path) -> None:  # noqa: F811
    with started(words(text, tmp_path / "out", *SHORT), first=partial(faulty, 1, CALL, 999)) as process:
        assert process.wait() == 1
        errors = printed(process.stderr)
    assert (
        "step 3 has loss nan and gradient norm nan: training cannot continue. First not finite: the output of" in errors
    )
    assert "layer blocks.0, which has nan in " in errors
    assert "in the forward of micro-batch 0 on stage 0, rank 0 of replica 1." in errors


@pytest.mark.parametrize("more", ["--schedule=pipedream", "--optimizer.barrier=false"])
def test_steps_that_update_before_the_norm_is_known_cannot_run_again(
    text: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: str,
) -> None:
    assert main(words(text, tmp_path / "out", "--local", "--on_nonfinite=retry", more)) == 2
    assert capsys.readouterr().err.startswith("pipeloom: error: on_nonfinite=retry: does not work with")
