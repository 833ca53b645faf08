"""Copies of a pipeline as processes: groups, channels of their own, and what is refused on every process."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pipeloom as pl
from pipeloom.errors import InputError
from tests.cpu.ranks import run_ranks


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def _two_pipelines(rank: int, order: tuple[str, str], transport: str) -> tuple[object, ...]:
    """Two pipelines one after the other, of which each copy evaluates samples of its own."""
    mesh = pl.Mesh(pp=2, dp=-1, order=order)
    copy = mesh.coordinate("dp")
    ones = torch.ones(1)
    dist.all_reduce(ones, group=mesh.group("dp"))
    with pytest.raises(InputError, match="'tp' has degree 1: only pp, dp and axes of a higher degree have a group"):
        mesh.group("tp")
    for ask in (mesh.group, mesh.degree, mesh.coordinate):
        with pytest.raises(InputError, match=r"mesh axis 'data' is unknown\. Use dp, pp, cp, tp, ep, edp"):
            ask("data")
    outputs = []
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    for scale in (1.0, 2.0):
        with pl.Pipeline(_model(), schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, transport=transport) as pipe:
            assert pipe.rank == mesh.coordinate("pp")
            output = pipe.forward(torch.full((4, 4), scale * (copy + 1)))
            outputs.append(None if output is None else output.tolist())
    return mesh.lines("pp"), int(ones), outputs


@pytest.mark.parametrize(
    ("order", "transport"), [(("dp", "pp"), "auto"), (("dp", "pp"), "torch"), (("pp", "dp"), "torch")]
)
def test_copies_of_a_pipeline_have_channels_of_their_own(order: tuple[str, str], transport: str) -> None:
    answers = run_ranks(_two_pipelines, 4, order, transport)
    lines = answers[0][0]
    assert lines == (((0, 1), (2, 3)) if order == ("dp", "pp") else ((0, 2), (1, 3)))
    assert all(size == 2 for _, size, _ in answers)
    with torch.no_grad():
        for copy, line in enumerate(lines):
            for number, scale in enumerate((1.0, 2.0)):
                expected = _model()(torch.full((4, 4), scale * (copy + 1)))
                assert answers[line[0]][2][number] is None
                # Of halves of the batch: which bits that gives depends on the processor.
                torch.testing.assert_close(torch.tensor(answers[line[1]][2][number]), expected)


def _make(rank: int, case: str) -> None:
    """What one process makes that does not fit the other's, or itself."""
    if case == "others":
        pl.Mesh(pp=2 if rank else 1, dp=1 if rank else 2)
    if case == "tensor":
        mesh = pl.Mesh(tp=2)
    else:
        mesh = pl.Mesh(dp=2)
    ranks = 2 if case == "ranks" else 1
    schedule = pl.schedules.one_f_one_b(num_ranks=ranks, num_microbatches=2)
    pl.Pipeline(_model(), schedule, mesh=mesh, transport="loopback" if case == "inside" else "auto")


def _refused(rank: int, case: str) -> str:
    with pytest.raises(InputError) as caught:
        _make(rank, case)
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("others", "all processes must form one mesh"),
        ("ranks", "mesh axis pp has degree 1: they must be equal. Use Mesh(pp=2, ...)"),
        ("inside", "each rank of each replica needs its own process"),
        ("tensor", "no parameter of the model is cut along tp"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_on_every_process(case: str, words: str) -> None:
    for answer in run_ranks(_refused, 2, case):
        assert words in answer
        assert "\n" not in answer


def test_a_mesh_needs_processes() -> None:
    with pytest.raises(InputError, match="needs a process group"):
        pl.Mesh(dp=2)


def test_an_interrupt_ends_all_threads() -> None:
    """Of `run_threads`: none is left when the interrupt reaches the caller."""
    running = threading.Event()

    def work() -> None:
        with pl.Mesh(tp=2) as mesh:
            while True:
                mesh.axis("tp").all_reduce(torch.ones(3))
                running.set()

    def interrupt() -> None:
        running.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pl.run_threads(2, work)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeloom-rank")]


def _one_after_another(rank: int) -> list[float]:
    sums = []
    for number in range(20):
        with pl.Mesh(dp=2, tp=2) as mesh:
            value = torch.tensor([float(number + rank)])
            dist.all_reduce(value, group=mesh._groups.along_all(("dp", "tp")))
            sums.append(value.item())
    return sums


def test_meshes_that_are_made_one_after_another_have_groups_of_their_own() -> None:
    """Its processes alone make the group of a line: they do not meet a closed group of an earlier mesh."""
    for sums in run_ranks(_one_after_another, 4, timeout_seconds=60):
        assert sums == [4 * number + 6 for number in range(20)]
