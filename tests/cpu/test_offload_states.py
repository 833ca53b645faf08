"""States of an optimizer in a file: the same numbers, less memory."""

from __future__ import annotations

import copy
import itertools
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipeloom as pl
from pipeloom.errors import InputError, RunError
from pipeloom.parallel.offload.offloaded_optimizer import OffloadedOptimizer
from pipeloom.parallel.offload.store import FileStore, HostStore, Store, page_buffer
from pipeloom.parallel.options import OffloadTarget
from tests.cpu.ranks import run_ranks
from tests.cpu.reference import make_mlp

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(_groups(p), lr=1e-2, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(_groups(p), lr=1e-2, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(_groups(p), lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor([q for q in p if q.numel()], lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
}


def _groups(parameters: list[nn.Parameter]):
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]


def _parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(40, 30), (7,), (30, 30), (30, 40), (130,), (11, 13), (0,)]
    found = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    return [*found, nn.Parameter(torch.randn(9, 8, 3, 3).to(memory_format=torch.channels_last))]


def _train(optimizer, parameters: list[nn.Parameter], first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for number, parameter in enumerate(parameters):
            skip = (step + number) % 5 == 0  # some parameters have no gradient in some steps
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if skip else torch.empty_like(parameter).copy_(drawn)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(params=["file", "host"])
def store(request, tmp_path: Path) -> Store:
    return FileStore(tmp_path) if request.param == "file" else HostStore()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_bitwise_those_without(name: str, store: Store) -> None:
    expected, parameters = _parameters(), _parameters()
    plain = OPTIMIZERS[name](expected)
    offloaded = OffloadedOptimizer(OPTIMIZERS[name](parameters), store, portion_bytes=9000, least_bytes=16)
    _train(plain, expected, 0, 7)
    _train(offloaded, parameters, 0, 7)
    assert all(torch.equal(a, b) for a, b in zip(expected, parameters, strict=True))
    assert offloaded.moved_bytes > 0 or name == "sgd"
    _assert_same_state(plain, offloaded)
    # and so they are after the state went through a state dict, in both directions
    others = _parameters()
    copies = OPTIMIZERS[name](others)
    copies.load_state_dict(copy.deepcopy(offloaded.state_dict()))  # torch's optimizers take tensors as they are
    offloaded.load_state_dict(copy.deepcopy(plain.state_dict()))
    with torch.no_grad():
        for a, b in zip(others, expected, strict=True):
            a.copy_(b)
    for optimizer, held in ((plain, expected), (offloaded, parameters), (copies, others)):
        _train(optimizer, held, 7, 9)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(expected, parameters, others, strict=True))
    offloaded.close()


def _assert_same_state(plain: torch.optim.Optimizer, offloaded: torch.optim.Optimizer) -> None:
    one, other = plain.state_dict(), offloaded.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert list(state) == list(other["state"][number])
        for key, value in state.items():
            found = other["state"][number][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, (number, key)


def test_states_lie_in_the_file_and_three_portions_in_memory(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of optimizers that nobody closed
    parameters = _parameters()
    optimizer = OffloadedOptimizer(
        OPTIMIZERS["adamw"](parameters), f"disk:{tmp_path}", portion_bytes=9000, least_bytes=1
    )
    count = sum(p.numel() for p in parameters)
    # two moments of four bytes each, and of each parameter the number of its steps
    assert optimizer.offloaded_bytes == 8 * count + 4 * (len(parameters) - 1)
    _train(optimizer, parameters, 0, 3)
    assert not list(tmp_path.iterdir())  # it has no name
    assert len(optimizer._portions) > 3
    assert sum(buffer.numel() for buffer in optimizer._buffers) <= 3 * 12288
    kept = [v for parameter, state in optimizer._states.data.items() for v in state.values() if parameter.numel()]
    assert not any(isinstance(value, Tensor) for value in kept)
    optimizer.close()
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name.startswith(("pipeloom-reload", "pipeloom-offload"))]


def test_a_learning_rate_scheduler_takes_it(tmp_path: Path) -> None:
    results = []
    for wrap in (lambda o: o, lambda o: OffloadedOptimizer(o, FileStore(tmp_path), least_bytes=1)):
        parameters = _parameters()
        optimizer = wrap(OPTIMIZERS["adamw"](parameters))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(3):
            _train(optimizer, parameters, step, step + 1)
            schedule.step()
        results.append(parameters)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_states_that_are_there_move_away(tmp_path: Path) -> None:
    expected, parameters = _parameters(), _parameters()
    plain, inner = OPTIMIZERS["adamw"](expected), OPTIMIZERS["adamw"](parameters)
    _train(plain, expected, 0, 4)
    _train(inner, parameters, 0, 2)
    offloaded = OffloadedOptimizer(inner, FileStore(tmp_path), portion_bytes=5000, least_bytes=16)
    _train(offloaded, parameters, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(expected, parameters, strict=True))


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_gives_back_what_was_written(tmp_path: Path, direct: bool) -> None:
    store = FileStore(tmp_path)
    if not direct and store._direct is not None:
        os.close(store._direct)
        store._direct = None
    sizes = [1, 4095, 4096, 4097, 5 << 20, (9 << 20) + 3]
    values = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    regions = [store.reserve(size) for size in sizes]
    for region, value in zip(regions, values, strict=True):
        store.write(region, value)
    store.write(regions[4].part(17, 100), torch.full((100,), 9, dtype=torch.uint8))
    values[4][17:117] = 9
    for region, value in zip(regions, values, strict=True):
        for room in (torch.zeros(value.numel(), dtype=torch.uint8), page_buffer(value.numel())):
            store.read(region, room)
            assert torch.equal(room, value)
        assert torch.equal(store.snapshot(region)[: value.numel()], value)
    assert store.written_bytes == sum(sizes) + 100
    store.release(regions[4])
    assert store.reserve(sizes[4]) == regions[4]
    store.close()


def _post_validated(store: Store) -> None:
    schedule = pl.schedules.one_f_one_b(num_ranks=2, num_microbatches=2)
    with pl.Pipeline(make_mlp(), schedule, loss_fn=nn.functional.mse_loss, transport="loopback") as pipe:
        pl.PostValidatedStep(pipe, OffloadedOptimizer(torch.optim.Adam(pipe.parameters()), store))


def test_what_cannot_be_offloaded_is_refused_in_one_line(tmp_path: Path) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["count"] = self.param_groups[0].get("count", 0) + 1

    parameters = _parameters()
    counting = Counting(parameters, lr=0.1)
    counting.param_groups[0]["count"] = 0
    inner = OPTIMIZERS["adamw"](parameters)
    cases = [
        (lambda: OffloadedOptimizer(inner, "cpu"), "are in host memory already"),
        (lambda: OffloadedOptimizer(inner, "disk:/no/such/place"), "No such file"),
        (lambda: OffloadedOptimizer(inner, "floppy"), "offload='floppy': must be `cpu`, or `disk:PATH`"),
        (lambda: OffloadedOptimizer(inner, "disk"), "offload='disk': must be `cpu`, or `disk:PATH`"),
        (lambda: OffloadedOptimizer(counting, FileStore(tmp_path)), "keeps state in its parameter groups"),
        (lambda: OffloadedOptimizer(torch.optim.LBFGS(parameters), FileStore(tmp_path)), "cannot be stepped"),
        (lambda: OffloadTarget.parse(f"disk:{__file__}"), "Not a directory"),
    ]
    for make, words in cases:
        with pytest.raises(InputError, match=words) as caught:
            make()
        assert "\n" not in str(caught.value)
    offloaded = OffloadedOptimizer(inner, FileStore(tmp_path))
    with pytest.raises(InputError, match=r"Use BarrierStep, or do not offload states\."):
        _post_validated(FileStore(tmp_path))
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(InputError, match=r"Call step\(\) of the OffloadedOptimizer"):
        inner.step()
    with pytest.raises(InputError, match="Add the group before wrapping"):
        offloaded.add_param_group({"params": []})


def test_a_disk_that_is_full_is_told_before_the_first_step(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        parameters = [nn.Parameter(torch.zeros(1 << 18))]
        with pytest.raises(InputError, match=r"no space for 2\.0 MiB in addition to 0\.0 MiB"):
            OffloadedOptimizer(torch.optim.Adam(parameters), f"disk:{tmp_path}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_fails_is_one_line(tmp_path: Path) -> None:
    class Broken(FileStore):
        def write(self, region, values):
            os.close(os.dup(self._plain))
            self._plain = self._direct = os.open(os.devnull, os.O_RDONLY)
            super().write(region, values)

    parameters = _parameters()
    offloaded = OffloadedOptimizer(
        OPTIMIZERS["adamw"](parameters), Broken(tmp_path), portion_bytes=5000, least_bytes=16
    )
    with pytest.raises(RunError, match="its file cannot be written") as caught:
        _train(offloaded, parameters, 0, 2)
    assert "\n" not in str(caught.value)


def _killed(rank: int, directory: str) -> None:
    """Three updates, and others in which this process is killed."""
    parameter = nn.Parameter(torch.zeros(1 << 18))
    optimizer = OffloadedOptimizer(torch.optim.Adam([parameter]), f"disk:{directory}")
    for step in itertools.count(1):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        if step == 3:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGKILL)).start()


def test_a_killed_run_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 0 ended without an answer"):
        run_ranks(_killed, 1, str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_states_that_do_not_fit_into_memory_train_from_a_file(tmp_path: Path) -> None:
    """Under a limit of the kernel's (RLIMIT_DATA): 128 MiB of parameters whose moments take 256, where 160 are left."""
    script = """
        import resource, sys, torch
        from pipeloom.parallel.offload.offloaded_optimizer import OffloadedOptimizer
        torch.set_num_threads(1)
        parameters = [torch.nn.Parameter(torch.ones(1 << 19)) for _ in range(64)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        adam = torch.optim.Adam(parameters, foreach=False)
        held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (held + (160 << 20),) * 2)
        optimizer = OffloadedOptimizer(adam, "disk:" + sys.argv[1], portion_bytes=8 << 20)
        for _ in range(2):
            optimizer.step()
        values = {float(parameter[5]) for parameter in parameters}
        print(optimizer.offloaded_bytes >> 20, max(values) < 0.999, len(values))
        optimizer.close()
        try:
            torch.optim.Adam(parameters, foreach=False).step()
        except (RuntimeError, MemoryError):
            print("does not fit")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    mapped = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is gone at once, heap without holes
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=mapped)
    assert done.stdout.splitlines() == ["256 True 1", "does not fit"], done.stderr
