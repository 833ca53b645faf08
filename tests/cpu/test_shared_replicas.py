"""Replicas of one host: parameters read in place, gradients summed through shared memory, and what is left of both."""

from __future__ import annotations

import gc
import os
import signal
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import PeerLost
from pipeloom.parallel.data.links import ProcessLinks, SharedLinks
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.transport import shared_memory
from pipeloom.transport.shared_flat import SharedFlat, memory_file
from tests.cpu.copies import OPTIMIZERS
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, tokens

WAYS = ("zero1", None), ("zero2", "microbatch"), ("zero3", "step"), ("zero3", "microbatch")
LAYOUTS = "elements", "parameters"


def _maps() -> int:
    """Mappings of memory files."""
    return Path("/proc/self/maps").read_text().count("memfd:pipeloom")


def _trained(mesh: pl.Mesh, strategy: str, granularity: str | None, layout: str) -> list[Tensor]:
    """The losses of three steps, the gradients of the last one, and the values after it."""
    pp, dp = mesh.degree("pp"), mesh.degree("dp")
    schedule = pl.schedules.one_f_one_b(num_ranks=pp, num_microbatches=3)
    data = pl.DataParallel(strategy, granularity=granularity, layout=layout, bucket_bytes=3000)
    found = []
    with pl.Pipeline(make_gpt(layers=2), schedule, loss_fn=language_loss, mesh=mesh, data=data) as pipe:
        optimizer = OPTIMIZERS["adamw"](pipe.parameters())
        for step in range(3):
            optimizer.zero_grad()
            inputs, targets = (each.chunk(dp)[mesh.coordinate("dp")] for each in tokens(6 * dp, seed=step))
            found.append(pipe.step(inputs, targets))
            optimizer.step()
        found += [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
        found += pipe.state_dict().values()
        assert _maps() or strategy == "zero1" or not isinstance(mesh.links("dp"), SharedLinks)
    return found


def _both_ways(rank: int, pp: int, dp: int, whole: bool) -> None:
    same_host = shared_memory.host_identity
    for number, (strategy, granularity) in enumerate(WAYS):
        for layout in LAYOUTS if whole else [LAYOUTS[(number + pp) % 2]]:
            with pl.Mesh(pp=pp, dp=dp) as mesh:
                assert isinstance(mesh.links("dp"), SharedLinks)
                shared = _trained(mesh, strategy, granularity, layout)
            shared_memory.host_identity = lambda: f"host {rank}"
            with pl.Mesh(pp=pp, dp=dp) as mesh:
                assert type(mesh.links("dp")) is ProcessLinks
                apart = _trained(mesh, strategy, granularity, layout)
            shared_memory.host_identity = same_host
            assert len(shared) == len(apart)
            assert all(map(torch.equal, shared, apart)), (strategy, granularity, layout)


@pytest.mark.parametrize("whole", fewer(False, True))
@pytest.mark.parametrize(("pp", "dp"), [(2, 2), (1, 4)])
def test_shared_memory_and_gloo_give_the_same_bits(pp: int, dp: int, whole: bool) -> None:
    """Each way to share on both meshes, with one layout on either; whole grids have all."""
    run_ranks(_both_ways, pp * dp, pp, dp, whole)


class _Slow(nn.Module):
    """A layer of which one process is slow."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(1000)), seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return x * self.weight.sum()


def _updates_early(rank: int) -> None:
    """Replica 0 is quick in its calls and slow in its updates, replica 1 slow in its calls."""
    mesh = pl.Mesh(dp=2)
    model = nn.Sequential(_Slow(0.0), _Slow(0.1 * rank))
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
    data = pl.DataParallel("zero3", granularity="microbatch", bucket_bytes=0)
    ones = torch.ones(2, 1)
    with pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data=data) as pipe:
        parameters = list(pipe.parameters())
        for call in range(4):
            expected = ones * (1000.0 * 2**call) ** 2
            if call % 2:
                assert pipe.step(ones, expected) == 0  # each layer has the values of this call
            else:
                assert torch.equal(pipe.forward(ones), expected)
            for parameter in parameters:
                time.sleep(0.0 if rank else 0.05)
                parameter.grad = None
                parameter.data.mul_(2)


def test_a_replica_reads_no_parameters_that_another_one_updates() -> None:
    run_ranks(_updates_early, 2)


class _Renormed(nn.Module):
    """A layer that changes its parameter in place, as an embedding with `max_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1000))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.add_(1.0)
        return x * self.weight.sum()


def _changes_in_place(rank: int) -> None:
    mesh = pl.Mesh(dp=2)
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=1)
    with pl.Pipeline([_Renormed()], schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data="zero3") as pipe:
        for _ in range(2):
            assert torch.equal(pipe.forward(torch.ones(1, 1)), torch.full((1, 1), 2000.0))
        assert all(bool((value == 1).all()) for value in pipe.state_dict().values())


def test_what_a_module_writes_into_gathered_parameters_is_dropped() -> None:
    run_ranks(_changes_in_place, 2)


class _Killed(nn.Module):
    """A layer in which one process is killed, in its second step."""

    def __init__(self, killed: Any) -> None:
        super().__init__()
        self.weight, self.killed, self.calls = nn.Parameter(torch.ones(10_000)), killed, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.killed is not None and self.calls == 4:
            self.killed.send(time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        return x * self.weight.sum()


def _one_is_killed(rank: int, strategy: str, precision: str | None, killed: Any, told: Any) -> None:
    before = _maps()
    mesh = pl.Mesh(dp=2)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=3)
    model = nn.Sequential(nn.Linear(4, 4), _Killed(killed if rank else None))
    data = pl.DataParallel(strategy, granularity="microbatch")
    pipe = pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data=data, precision=precision)
    ones = torch.ones(3, 4)
    pipe.step(ones, ones)
    with pytest.raises(PeerLost, match=r"another replica exited or did not answer in time .*rank 1 ended"):
        pipe.step(ones, ones)
    seconds = time.time()
    del pipe, mesh, model
    gc.collect()
    told.send((seconds, _maps() - before))
    os._exit(0)  # the group is broken


@pytest.mark.parametrize(("strategy", "precision"), [("zero2", None), ("zero3", None), ("zero3", "bf16")])
def test_a_killed_replica_is_lost_at_once_and_leaves_no_memory(strategy: str, precision: str | None) -> None:
    (killed, writer), (told, answer) = Pipe(duplex=False), Pipe(duplex=False)
    with pytest.raises(AssertionError, match="ended without an answer"):
        run_ranks(_one_is_killed, 2, strategy, precision, writer, answer)
    assert told.poll(1)
    noticed, left = told.recv()
    assert noticed - killed.recv() < 2
    assert left == 0


def _meshes(rank: int) -> list[tuple[int, int]]:
    """Mappings and descriptors before and after each of several meshes with a pipeline."""
    gc.collect()
    found = [(_maps(), len(os.listdir("/proc/self/fd")))]  # a forked process has those of the tests before
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
    for _ in range(4):
        with (
            pl.Mesh(dp=2) as mesh,
            pl.Pipeline([nn.Linear(4, 4)], schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data="zero3") as pipe,
        ):
            pipe.step(torch.ones(2, 4), torch.ones(2, 4))
            ReplicaGroup(mesh).sum_in_order(torch.ones(1))
        del pipe, mesh
        gc.collect()
        found.append((_maps(), len(os.listdir("/proc/self/fd"))))
    return found


def _meets(rank: int) -> tuple[float, float]:
    """When a replica calls `meet`, and when its wait is over."""
    replicas = ReplicaGroup(pl.Mesh(dp=2))
    time.sleep(0.0 if rank else 0.2)
    start = time.monotonic()
    replicas.meet()()
    return start, time.monotonic()


def test_replicas_meet() -> None:
    starts, ends = zip(*run_ranks(_meets, 2), strict=True)
    assert max(starts) <= min(ends)


def test_closed_pipelines_leave_no_mapping_and_no_descriptor() -> None:
    for before, first, *others in run_ranks(_meshes, 2):
        assert first[0] <= before[0]
        assert all(maps <= before[0] and descriptors <= first[1] for maps, descriptors in others)


class _WithEmpty(nn.Linear):
    """A layer with a parameter without elements, alone of its dtype."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.empty = nn.Parameter(torch.zeros(0, dtype=torch.float64))


def _has_empty(rank: int) -> None:
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=1)
    with pl.Pipeline(
        [_WithEmpty()], schedule, loss_fn=nn.functional.mse_loss, mesh=pl.Mesh(dp=2), data="zero3"
    ) as pipe:
        pipe.step(torch.ones(1, 4), torch.ones(1, 4))
        assert pipe.state_dict()["empty"].shape == (0,)


def test_parameters_without_elements_need_no_memory() -> None:
    run_ranks(_has_empty, 2)


def _ends(rank: int) -> int:
    """How often a run unmaps blocks that it has not used."""
    mesh, calls = pl.Mesh(pp=2, dp=2), []
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(make_gpt(tied=True), schedule, loss_fn=language_loss, mesh=mesh, data="zero2") as pipe:
        transport = mesh._replica_transport
        assert transport is not None
        end_step = transport.end_step
        transport.end_step = lambda: (calls.append(None), end_step())[1]  # type: ignore[method-assign]
        pipe.step(*tokens(4, seed=0))
    return len(calls)


def test_a_run_that_sums_over_ranks_too_ends_once() -> None:
    assert run_ranks(_ends, 4) == [1] * 4


def _infers(rank: int) -> None:
    with pl.Mesh(pp=2) as mesh:
        schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=4)
        with pl.Pipeline(make_gpt(), schedule, loss_fn=language_loss, mesh=mesh) as pipe:
            with torch.inference_mode():
                pipe.evaluate(*tokens(8, seed=0))
            pipe.step(*tokens(8, seed=0))


def test_steps_after_an_evaluation_in_inference_mode() -> None:
    run_ranks(_infers, 2)


def _replaces(rank: int) -> None:
    """Updates that set `data` against updates in place."""
    mesh = pl.Mesh(dp=2)
    schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=2)
    x, y = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(rank))
    for strategy, precision in (("ddp", None), ("zero1", None), ("zero3", None), ("ddp", "bf16"), ("zero3", "bf16")):
        found = []
        for replaces in (False, True):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 4))
            with pl.Pipeline(
                model, schedule, loss_fn=nn.functional.mse_loss, mesh=mesh, data=strategy, precision=precision
            ) as pipe:
                for _ in range(3):
                    pipe.step(x, y)
                    for parameter in pipe.parameters():
                        if parameter.grad is not None:
                            change = parameter.grad.to(parameter.dtype)
                            parameter.data = parameter.data - change if replaces else parameter.data.sub_(change)
                        parameter.grad = None
                found.append([pipe.forward(x), *pipe.state_dict().values()])
        assert all(map(torch.equal, *found)), (strategy, precision)


def test_updates_may_replace_the_memory_of_parameters() -> None:
    run_ranks(_replaces, 2)


def test_a_shared_flat_has_values_of_all_and_writes_of_one() -> None:
    descriptor = memory_file(4 * 3000, "a test")
    one, two = (SharedFlat(os.dup(descriptor), 3000, torch.float32) for _ in range(2))
    os.close(descriptor)
    first, second = one.segment(slice(0, 1000)), two.segment(slice(1000, 3000))
    assert first.untyped_storage().nbytes() == 4000
    first.fill_(1.0), second.fill_(2.0)
    for flat in (one, two):
        assert torch.equal(flat.values, torch.tensor([1.0] * 1000 + [2.0] * 2000))
    one.values[0] = 5.0
    assert two.values[0] == first[0] == 1.0
    one.forget()
    first[0] = 3.0
    assert one.values[0] == two.values[0] == 3.0
