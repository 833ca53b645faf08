"""Training goes on from a checkpoint of other pipeline ranks, other copies and another strategy as if nothing was."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.common.tensor_file import HashingFile
from pipeloom.processes.exchange import DistributedExchange
from pipeloom.train import checkpoint as ck
from pipeloom.training import BarrierStep, LossScaler
from tests.cpu.ranks import run_ranks

NUM_SAMPLES = 8


class Setting(NamedTuple):
    """How a run is spread, and what it computes in."""

    pp: int
    dp: int = 1
    data: Any = None
    precision: str = "fp32"
    tied: bool = False

    @property
    def size(self) -> int:
        return self.pp * self.dp


class Steps(NamedTuple):
    """Steps `first` to `last`, from the checkpoint `resume`, saved after each of `saves` into `output_dir`."""

    output_dir: Path
    first: int
    last: int
    saves: tuple[int, ...] = ()
    resume: Path | None = None


def build(setting: Setting) -> nn.Sequential:
    torch.manual_seed(3)
    sizes = [(6, 10), (10, 7), (7, 6)]
    layers: list[nn.Module] = [nn.Embedding(11, 6)]
    for pair in sizes:
        layers += [nn.Linear(*pair), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(6, 11, bias=False))
    if setting.tied:
        model[-1].weight = model[0].weight
    return model.double() if setting.precision == "fp32" else model


def batch(step: int, mesh: pl.Mesh | None) -> tuple[Tensor, Tensor]:
    """This copy's samples of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randint(0, 11, (2, NUM_SAMPLES), generator=generator)
    copy, copies = (mesh.coordinate("dp"), mesh.degree("dp")) if mesh else (0, 1)
    own = slice(copy * NUM_SAMPLES // copies, (copy + 1) * NUM_SAMPLES // copies)
    return inputs[own], targets[own]


def make_optimizer(pipe: pl.Pipeline) -> torch.optim.Optimizer:
    """Two groups, as by shape; parts go where their parameter does."""
    matrices, vectors = [], []
    for name, parameter in pipe.named_parameters():
        shape = pipe.state.ranges[name].shape if name in pipe.state.ranges else parameter.shape
        (matrices if len(shape) > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.03)


def go(rank: int, setting: Setting, steps: Steps) -> list[float]:
    """The losses of the steps, as one process sees them."""
    mesh = pl.Mesh(pp=setting.pp, dp=setting.dp) if setting.dp > 1 else None
    schedule = pl.schedules.one_f_one_b(num_ranks=setting.pp, num_microbatches=2)
    with pl.Pipeline(
        build(setting),
        schedule,
        loss_fn=nn.functional.cross_entropy,
        mesh=mesh,
        data=setting.data,
        precision=setting.precision,
        transport="torch",
    ) as pipe:
        names = {parameter: name for name, parameter in pipe.named_parameters()}
        optimizer = make_optimizer(pipe)
        scaler = LossScaler(2.0**22, growth_steps=2) if setting.precision == "fp16" else None
        stepper = BarrierStep(pipe, optimizer, max_norm=0.5, scaler=scaler)
        if steps.resume is not None:
            saved = ck.load(steps.resume)
            saved.load_model(pipe.state.main_state(), pipe.state.ranges)
            pipe.state.refresh()
            saved.load_optimizer(optimizer, names, pipe.state.ranges)
            if scaler is not None:
                scaler.load(saved.state["scaler"])
        losses = []
        for step in range(steps.first, steps.last + 1):
            (update,) = stepper.step(*batch(step, mesh))
            losses.append(update.loss.item())
            if step in steps.saves:
                ck.save(
                    steps.output_dir,
                    step,
                    model=pipe.state.main_state(),
                    optimizer=ck.optimizer_state(optimizer, names),
                    state={"scaler": scaler.state()} if scaler else {},
                    ranges=pipe.state.ranges,
                    ties=pipe.state.ties,
                    compute_type=None if setting.precision == "fp32" else setting.precision,
                    exchange=DistributedExchange(),
                )
        return losses


def run(setting: Setting, steps: Steps) -> list[float]:
    answers = run_ranks(go, setting.size, setting, steps)
    assert all(losses == answers[0] for losses in answers)
    return answers[0]


def model_of(path: Path) -> dict[str, Tensor]:
    saved = ck.load(path)
    return {name: saved.tensor(name) for name in build(Setting(1)).state_dict()}


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-13, msg=name)


@pytest.mark.parametrize("whole_grid", [False, pytest.param(True, marks=pytest.mark.whole_grid)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_copies_goes_on_in_any_layout(tied: bool, whole_grid: bool, tmp_path: Path) -> None:
    """Tied in half of the layouts, untied in the others, but for the layout that saved; in whole grids all in both."""
    home = Setting(2, 2, pl.DataParallel("zero3", bucket_bytes=0), tied=tied)
    whole = run(home, Steps(tmp_path, 1, 5, (2, 5)))
    start, end = tmp_path / "checkpoint-2", model_of(tmp_path / "checkpoint-5")
    others = [
        home,
        Setting(1),
        Setting(4),
        Setting(2),
        Setting(1, 2, "ddp"),
        Setting(2, 2, pl.DataParallel("zero3", "microbatch", bucket_bytes=600)),  # other units, with other padding
        Setting(2, 2, pl.DataParallel("zero2", layout="parameters")),
        Setting(2, 2, "parameter-server"),
    ]
    for number, other in enumerate(others):
        out = tmp_path / str(number)
        if not whole_grid and number and number % 2 == tied:
            continue
        other = other._replace(tied=tied)
        losses = run(other, Steps(out, 3, 5, (5,), start))
        if number == 0:
            assert losses == whole[2:]
        assert losses == pytest.approx(whole[2:], rel=1e-12), other
        assert_near(model_of(out / "checkpoint-5"), end)


def test_strategies_follow_each_other(tmp_path: Path) -> None:
    whole = run(Setting(1), Steps(tmp_path / "whole", 1, 4, (4,)))
    losses, path = [], None
    for step, strategy in enumerate(["zero1", "zero3", "parameter-server", "ddp"], 1):
        losses += run(Setting(2, 2, strategy), Steps(tmp_path, step, step, (step,), path))
        path = tmp_path / f"checkpoint-{step}"
    assert losses == pytest.approx(whole, rel=1e-12)
    assert path is not None
    assert_near(model_of(path), model_of(tmp_path / "whole" / "checkpoint-4"))


def die_in_save(rank: int, setting: Setting, steps: Steps, victim: int, num_writes: int) -> list[float]:
    """`go`, but one process is killed at a write of its second save."""
    write, count = HashingFile.write, 0

    def counted(file: HashingFile, data: Any) -> None:
        nonlocal count
        count += (steps.output_dir / "checkpoint-1").exists()
        if count == num_writes:
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, data)

    if rank == victim:
        HashingFile.write = counted  # type: ignore[method-assign]  # this process is the test's alone
    return go(rank, setting, steps)


def test_a_process_killed_in_a_save_leaves_the_last_good_one(tmp_path: Path) -> None:
    setting = Setting(2, 2, pl.DataParallel("zero3", bucket_bytes=0))
    whole = run(setting, Steps(tmp_path / "whole", 1, 2))
    for victim, num_writes in ((0, 19), (1, 1), (3, 5)):
        out = tmp_path / str(victim)
        with pytest.raises(AssertionError, match=f"rank {victim} ended without an answer"):
            run_ranks(die_in_save, 4, setting, Steps(out, 1, 2, (1, 2)), victim, num_writes)
        assert any(entry.path.name.startswith(".") for entry in ck.list_checkpoints(out)) == (victim == 0)
        assert ck.latest(out) == out / "checkpoint-1"
        assert [entry.path.name for entry in ck.list_checkpoints(out)] == ["checkpoint-1"]
        ck.verify(out / "checkpoint-1")
        assert run(setting, Steps(out, 2, 2, (2,), out / "checkpoint-1")) == whole[1:]


@pytest.mark.parametrize(("precision", "data"), [("bf16", "zero2"), ("fp16", "zero3"), ("fp16", None)])
def test_masters_are_the_model_and_the_loss_scale_goes_on(precision: str, data: str | None, tmp_path: Path) -> None:
    setting = Setting(2, 2 if data else 1, data, precision)
    whole = run(setting, Steps(tmp_path, 1, 6, (4, 6)))
    again = run(setting, Steps(tmp_path / "again", 5, 6, (6,), tmp_path / "checkpoint-4"))
    assert again == whole[4:]
    saved = ck.load(tmp_path / "checkpoint-4")
    assert saved.compute_type == precision
    if precision == "fp16":
        scaler = saved.state["scaler"]
        assert scaler["num_skipped"] > 0, "the test needs an overflow"
        assert ck.load(tmp_path / "again").state == ck.load(tmp_path / "checkpoint-6").state
    for file in saved.path.glob("model-*.safetensors"):
        assert {tensor.dtype for tensor in safetensors.torch.load_file(file).values()} <= {torch.float32}
    end, back = model_of(tmp_path / "checkpoint-6"), model_of(tmp_path / "again" / "checkpoint-6")
    assert all(torch.equal(tensor, end[name]) for name, tensor in back.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in back.values())
