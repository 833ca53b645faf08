"""Main parameters in a file: the same numbers to the last bit, less memory."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError, PeerLost, RunError
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.offload import main_parameters as main_memory
from pipeloom.parallel.offload.store import FileStore
from tests.cpu.pairwise import fewer
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import language_loss, make_gpt, make_mlp, tokens

mse = nn.functional.mse_loss
ONE = pl.schedules.gpipe(num_ranks=1, num_microbatches=2)
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "muon": lambda p: torch.optim.Muon([q for q in p if q.numel() and q.dim() == 2], lr=1e-2),
}


def _groups(parameters: Any) -> list[dict[str, Any]]:
    parameters = list(parameters)
    matrices = [p for p in parameters if p.numel() > 300]  # neighbours of others, so that portions mix groups
    rest = [p for p in parameters if p.numel() <= 300]
    return [{"params": held, "weight_decay": decay} for held, decay in ((matrices, 0.1), (rest, 0.0)) if held]


class Case(NamedTuple):
    strategy: str
    granularity: str | None
    schedule: str
    precision: str
    optimizer: str
    layout: str = "elements"
    gradients: str = "float32"


TWO_COPIES = [
    Case("zero3", "step", "zb-v", "fp32", "momentum"),
    Case("zero3", "chunk", "bfs", "bf16", "adamw", gradients="same"),
    Case("zero3", "microbatch", "zb-h1", "fp32", "muon", "parameters"),
    Case("zero2", "chunk", "interleaved", "bf16", "adamw"),
    Case("parameter-server", None, "1f1b", "bf16", "momentum"),
    Case("ddp", None, "gpipe", "fp16", "sgd"),
    # In whole grids: each of their values is above, but for the schedule dualpipev, whose stages lie as those of zb-v.
    Case("zero3", "microbatch", "1f1b", "fp32", "adamw"),
    Case("zero3", "microbatch", "dualpipev", "bf16", "sgd"),
]


def _train(
    case: Case, mesh: pl.Mesh | None, directory: str | None, bucket_bytes: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, norms and what comes of them; with a directory, parameters and states go there."""
    model = make_gpt(tied=True)
    model.blocks[1].qkv.weight.requires_grad_(False)
    schedule = pl.schedules.build(case.schedule, num_ranks=2, num_microbatches=4)
    where = f"disk:{directory}" if directory else None
    data = pl.DataParallel(case.strategy, case.granularity, case.layout, bucket_bytes=bucket_bytes, offload=where)
    precision = pl.Precision(case.precision, gradients=case.gradients)
    half = slice(None) if mesh is None else slice(0, 8) if mesh.coordinate("dp") == 0 else slice(8, 16)
    with pl.Pipeline(model, schedule, loss_fn=language_loss, mesh=mesh, data=data, precision=precision) as pipe:
        optimizer = OPTIMIZERS[case.optimizer](pipe.parameters())
        if where:
            optimizer = pl.OffloadedOptimizer(optimizer, where, portion_bytes=9000, least_bytes=64)
        found = []
        for step in range(3):
            if step == 2:  # from now on it trains too, and another one does not
                model.blocks[1].qkv.weight.requires_grad_(True)
                model.blocks[2].mlp_up.weight.requires_grad_(False)
            inputs, targets = (values[half] for values in tokens(16, seed=step))
            found += [float(pipe.step(inputs, targets)), float(pl.clip_grad_norm(pipe, 0.5))]
            pl.update_parameters(optimizer)
            optimizer.zero_grad()
            if step:
                found.append(float(pipe.evaluate(inputs, targets)))
        held, away = pipe.memory.held_bytes(), pipe.memory.offloaded_parameters
        owned = sum(p.numel() * p.itemsize for p in pipe.parameters())
        if where:
            assert away.num_bytes == owned
            assert held.masters <= 4 * len(list(pipe.parameters()))
            assert away.moved_bytes > away.num_bytes or not owned
            assert pipe.memory.offload_traffic.moved_bytes == away.moved_bytes
            optimizer.close()
    return found, {name: value.clone() for name, value in pipe.state_dict().items()}  # also of a closed one


def _compare(case: Case, mesh: pl.Mesh | None, directory: str, bucket_bytes: int = 0) -> None:
    expected, values = _train(case, mesh, None, bucket_bytes)
    found, others = _train(case, mesh, directory, bucket_bytes)
    assert found == expected, case
    assert values.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in values.items()), case


def _compare_copies(rank: int, directory: str, cases: list[Case]) -> None:
    mesh = pl.Mesh(pp=2, dp=2)
    for number, case in enumerate(cases):
        _compare(case, mesh, directory, (5000, 2**20, 0)[number % 3])
    names = {thread.name.rpartition("_")[0] for thread in threading.enumerate()}
    assert not names & {"pipeloom-reload", "pipeloom-offload"}


@pytest.mark.parametrize("cases", fewer(TWO_COPIES[:6], TWO_COPIES), ids=["few", "all"])
def test_with_copies_numbers_are_bitwise_those_without(cases: list[Case], tmp_path: Path) -> None:
    run_ranks(_compare_copies, 4, str(tmp_path), cases)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "case",
    [
        Case("zero3", "step", "1f1b", "bf16", "momentum"),
        Case("zero3", "chunk", "bfs", "fp32", "adamw"),
        Case("zero3", "microbatch", "zb-v", "bf16", "muon"),
        Case("ddp", None, "1f1b", "bf16", "adamw"),
    ],
)
def test_of_one_copy_too(case: Case, tmp_path: Path) -> None:
    _compare(case, None, str(tmp_path))


def _order(rank: int, directory: str) -> list[str]:
    """What a forward of four layers does on the thread that computes."""
    log: list[str] = []
    number: dict[int, int] = {}
    mesh = pl.Mesh(dp=2)
    model = nn.Sequential(*[nn.Linear(8 * k, 8 * k + 8, bias=False) for k in range(1, 5)])
    layers = {parameter.numel(): k for k, parameter in enumerate(model.parameters())}
    for k, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, k=k: log.append(f"compute {k}"))
    read, gather = main_memory.OffloadedShard._start_read, ReplicaGroup.all_gather

    def logged_read(self, target):
        log.append(f"read {number.setdefault(id(self), len(number))}")
        return read(self, target)

    def logged_gather(self, values, own):
        log.append(f"gather {layers[values.numel()]}")
        return gather(self, values, own)

    data = pl.DataParallel("zero3", "microbatch", bucket_bytes=0, offload=f"disk:{directory}")
    with pl.Pipeline(model, ONE, layers=["0", "1", "2", "3"], loss_fn=mse, mesh=mesh, data=data) as pipe:
        main_memory.OffloadedShard._start_read, ReplicaGroup.all_gather = logged_read, logged_gather
        pipe.evaluate(torch.randn(2, 8), torch.randn(2, 40))
    return log[: len(log) // 2]


def test_a_layer_is_read_while_the_next_is_gathered_and_the_one_behind_computes(tmp_path: Path) -> None:
    for log in run_ranks(_order, 2, str(tmp_path)):
        assert log == [
            "read 0", "read 1", "gather 0", "gather 1", "read 2", "compute 0", "gather 2", "read 3", "compute 1",
            "gather 3", "compute 2", "compute 3",
        ]  # fmt: skip


def _round_trip(rank: int, directory: str) -> None:
    mesh = pl.Mesh(dp=2)
    x, y = tokens(6)
    batch = x.chunk(2)[rank], y.chunk(2)[rank]
    for strategy, precision, layout in [("zero3", None, "elements"), ("zero1", "bf16", "parameters")]:
        data = pl.DataParallel(strategy, layout=layout, offload=f"disk:{directory}")
        options = {"loss_fn": language_loss, "mesh": mesh, "data": data, "precision": precision}
        with pl.Pipeline(make_gpt(tied=True), ONE, **options) as pipe:
            optimizer = pl.OffloadedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.5), None, portion_bytes=3000)
            assert optimizer.offloaded_bytes == 0
            pipe.step(*batch)
            optimizer.step()
            main, ranges = pipe.state.main_state(), pipe.state.ranges  # while writes are on their way
            state = {name: value.clone() for name, value in pipe.state_dict().items()}
            loss = pipe.evaluate(*batch)
            for name, parameter in pipe.named_parameters():
                start, stop, _ = ranges.get(name, (0, parameter.numel(), None))
                assert torch.equal(state[name].flatten()[start:stop], main[name].flatten())
                assert parameter.isnan().all()
            optimizer.close()
        with pl.Pipeline(make_gpt(tied=True), ONE, **options) as other:
            other.load_state_dict(state)
            assert torch.equal(other.evaluate(*batch), loss)
            for value in other.state.main_state().values():
                value.zero_()
            other.state.refresh()
            assert not any(value.any() for value in other.state_dict().values())
            for name, value in main.items():
                other.state.main_state()[name].copy_(value)
            assert torch.equal(other.evaluate(*batch), loss)


def test_they_go_out_and_in_whole_and_in_parts(tmp_path: Path) -> None:
    run_ranks(_round_trip, 2, str(tmp_path))


def _tied_apart(rank: int, directory: str) -> None:
    schedule, batch = pl.schedules.gpipe(num_ranks=2, num_microbatches=2), tokens(4)
    for offload, wrong in ((f"disk:{directory}", 2.0), (None, 2.0), (None, float("nan"))):
        data = pl.DataParallel("zero3", "microbatch", offload=offload)
        with pl.Pipeline(make_gpt(tied=True), schedule, loss_fn=language_loss, data=data) as pipe:
            pipe.step(*batch)
            if rank == 1:
                pipe.state.main_state()["embedding.weight"].mul_(wrong)
            with pytest.raises((RunError, PeerLost), match=r"'embedding\.weight' is not the same on this rank|ended"):
                pipe.step(*batch)


def test_tied_parameters_that_differ_are_noticed_also_in_files(tmp_path: Path) -> None:
    run_ranks(_tied_apart, 2, str(tmp_path))
    data = pl.DataParallel("zero3", "microbatch", offload=f"disk:{tmp_path}")
    schedule, batch = pl.schedules.gpipe(num_ranks=2, num_microbatches=2), tokens(4)
    with pl.Pipeline(make_gpt(tied=True), schedule, loss_fn=language_loss, data=data, transport="loopback") as pipe:
        pipe.step(*batch)
        pipe.state.stores[1].value("embedding.weight").mul_(2)
        with pytest.raises(InputError, match=r"'embedding\.weight' differs on ranks 0 and 1"):
            pipe.step(*batch)


def _pipe(directory: Path, **options: Any) -> pl.Pipeline:
    data = pl.DataParallel("zero3", "microbatch", bucket_bytes=0, offload=f"disk:{directory}")
    return pl.Pipeline(make_mlp(), ONE, **{"loss_fn": mse, "data": data, "transport": "loopback", **options})


def test_what_cannot_be_done_is_refused_in_one_line(tmp_path: Path) -> None:
    place = f"disk:{tmp_path}"
    parameters = [nn.Parameter(torch.zeros(8))]
    cases = [
        (lambda: _pipe(tmp_path, data=pl.DataParallel("ddp", offload=place)), "with ddp in fp32: forwards read"),
        (lambda: _pipe(tmp_path, data=pl.DataParallel("zero2", offload=place)), "Use zero3"),
        (lambda: _pipe(tmp_path, data=pl.DataParallel("zero3", offload="cpu")), "are in host memory already"),
        (lambda: pl.DataParallel("zero3", offload="disk:/no/such/place"), "No such file"),
        (lambda: pl.OffloadedOptimizer(torch.optim.SGD(parameters), None), "nothing to offload"),
    ]
    for make, words in cases:
        with pytest.raises(InputError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)
    nothing = pl.OffloadedOptimizer(torch.optim.SGD([nn.Parameter(torch.empty(0))]), None)  # of a copy without pieces
    nothing.close()
    with pytest.raises(InputError, match=r"after close\(\): the states are deleted"):
        nothing.step()
    x = torch.randn(4, 8)
    with _pipe(tmp_path) as pipe:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            plain = kind(pipe.parameters(), lr=0.1)
            plain.step()  # without gradients nothing is due
            pipe.step(x, x)
            with pytest.raises(InputError, match=rf"{kind.__name__}\.step\(\): the parameters are offloaded"):
                plain.step()
            plain.zero_grad()
        with pytest.raises(InputError, match=r"Wrap it in pipeloom\.OffloadedOptimizer"):
            pl.BarrierStep(pipe, plain).step(x, x)


def test_a_disk_that_is_full_is_told_when_the_pipeline_is_made(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 13, before[1]))
    try:
        with pytest.raises(InputError, match=r"no space for 0\.0 MiB in addition") as caught:
            _pipe(tmp_path)
        assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_update_that_is_lost_is_one_line_and_no_other_numbers(tmp_path: Path, monkeypatch) -> None:
    x = torch.randn(4, 8)
    with _pipe(tmp_path) as pipe, monkeypatch.context() as patch:
        optimizer = pl.OffloadedOptimizer(torch.optim.SGD(pipe.parameters(), lr=0.1), None)
        pipe.step(x, x)

        def broken(self, region, values):
            raise RunError("its file cannot be written")

        patch.setattr(FileStore, "write", broken)
        optimizer.step()
        optimizer.close()
        for read in (pipe.state.main_state, pipe.state_dict, lambda: pipe.step(x, x)):
            with pytest.raises(RunError, match="its file cannot be written"):
                read()


SCRIPT = """
    import os, resource, sys, threading, torch
    from torch import nn
    import pipeloom as pl
    torch.set_num_threads(1)
    threading.stack_size(1 << 20)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch._dynamo
    directory, parameters = sys.argv[1], bool(os.fork())
    if parameters:
        os.wait()  # the run without is over
    schedule = pl.schedules.gpipe(num_ranks=1, num_microbatches=2)
    model = nn.Sequential(*[nn.Linear(512, 512, bias=False) for _ in range(32)])
    for parameter in model.parameters():
        nn.init.eye_(parameter)
    data = pl.DataParallel("zero3", "microbatch", offload=f"disk:{directory}" if parameters else None)
    pipe = pl.Pipeline(model, schedule, loss_fn=nn.functional.mse_loss, data=data, transport="loopback")
    optimizer = pl.OffloadedOptimizer(torch.optim.Adam(pipe.parameters(), foreach=False), f"disk:{directory}",
                                      portion_bytes=4 << 20)
    held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
    if not parameters:
        held -= 32 << 20  # as if they were in a file
    resource.setrlimit(resource.RLIMIT_DATA, (held + (72 << 20),) * 2)
    x = torch.ones(4, 512)
    try:
        for _ in range(2):
            pipe.step(x, 0 * x)
            optimizer.step()
            optimizer.zero_grad()
    except (RuntimeError, MemoryError, OSError) as error:
        print("does not fit" if "memory" in f"{error!r}".lower() else repr(error), flush=True)
    else:
        offloaded = pipe.memory.offloaded_parameters
        print("fits", f"{float(pipe.step(x, 0 * x)):.3f}", offloaded.num_bytes >> 20, flush=True)
    while parameters:
        pipe.step(x, 0 * x)
"""


def test_a_model_that_does_not_fit_into_memory_trains_from_a_file(tmp_path: Path) -> None:
    """Under a limit of the kernel's (RLIMIT_DATA): 32 MiB of parameters, as much of gradients, twice that of states.

    Of these 128 MiB a file has the states of both runs. Where it has the parameters too, the 72 that there are take
    gradients, two layers, three portions of 4 and what threads take. Then it is killed.
    """
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is gone at once, heap without holes
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=mapped,
    ) as process:
        try:
            lines = [process.stdout.readline().split() for _ in range(2)]
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
        states, parameters = (line or process.stderr.read() for line in lines)
    assert parameters[0] == "fits", parameters
    assert parameters[2] == "32"
    assert float(parameters[1]) < 1.0
    assert states == ["does", "not", "fit"]
    assert not list(tmp_path.iterdir())
