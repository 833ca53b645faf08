"""`pipeloom doctor`: checks whether this machine can train, by trying what a run needs."""

import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.rank_order import AxisRow, order_lines, rank_order
from pipeloom.cli.common.train_options import add_option
from pipeloom.common.cores import usable_cores
from pipeloom.common.quantities import bytes_text
from pipeloom.errors import InputError, PipeloomError, unwrapped
from pipeloom.train.config.option_list import options as train_options
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.version import __version__

# Required packages by import name, and their lowest versions.
_REQUIRED = {"torch": "2.10", "numpy": "1.26", "safetensors": "0.5", "jsonargparse": "4.40"}
_REQUIRED |= {"yaml": "6", "scipy": "1.11", "rich": "13.7", "jinja2": "3.1"}
_DISTRIBUTION = {"yaml": "pyyaml"}  # import name -> package name, where they differ
# Optional packages: their use, and what to install.
_EXTRAS = {
    "tokenizers": ("byte-pair tokenizers (--data.tokenizer)", "'pipeloom[tokenizers]'"),
    "pyarrow": ("Parquet files, and with it .zst and URLs (--data.path)", "'pipeloom[data]'"),
    "transformers": ("Hugging Face models", "'pipeloom[huggingface]'"),
    "peft": ("adapters (--model.lora)", "'pipeloom[lora]'"),
    "accelerate": ("transformers' Trainer on a pipeline", "'pipeloom[trainer]'"),
    "tensorboard": ("metrics (--report_to)", "'pipeloom[tensorboard]'"),
    "wandb": ("metrics (--report_to)", "'pipeloom[wandb]'"),
    "trackio": ("metrics (--report_to)", "'pipeloom[trackio]'"),
    "ortools": ("bounds of searched schedules (--prove)", "'pipeloom[search]'"),
}


_EXAMPLES = """\
pipeloom doctor
pipeloom doctor --json
pipeloom doctor --measure
pipeloom doctor --parallel.data 4 --parallel.tensor 8 --processes_per_node 8
"""
_MESH = tuple(
    f"parallel.{name}" for name in ("pipeline", "data", "tensor", "context", "expert", "expert_axes", "order")
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. Only a `required` one that is not `ok` keeps pipeloom from training here."""

    name: str
    ok: bool
    found: str
    required: bool = False
    fix: str | None = None


def main(argv: list[str]) -> int:
    """Run `pipeloom doctor ARGV`: 0 when pipeloom can train on this machine, 1 when something required is missing."""
    about = "Check what a run needs on this machine, and say how to install what is missing."
    parser = Parser("pipeloom doctor", about, examples=_EXAMPLES)
    parser.add_argument("--json", action="store_true", help="output as one JSON object")
    parser.add_argument(
        "--processes_per_node", type=int, default=None, metavar="N", help="for the rank order (default: all)"
    )
    measure = "measure matrix products, memory, messages and collectives, and save them as cluster local"
    parser.add_argument("--measure", action="store_true", help=measure)
    parser.add_argument(
        "--out", default=None, metavar="FILE", help="cluster file of --measure (default: that of local)"
    )
    known = {option.key: option for option in train_options()}
    group = parser.add_argument_group("rank order of a run, as in pipeloom train")
    for key in _MESH:
        add_option(group, known[key])
    options = parser.parse_args(argv)
    order = _rank_order(options)
    if options.measure:
        from pipeloom.cli.common.measuring import measure_and_save

        return measure_and_save(options.out, as_json=options.json)
    if options.out is not None:
        raise InputError(f"--out={options.out}: has no effect without --measure. Add --measure.")
    checks = examine()
    can_train = all(check.ok for check in checks if check.required)
    if options.json:
        answer: dict[str, Any] = {
            "pipeloom": __version__,
            "can_train": can_train,
            "checks": [asdict(check) for check in checks],
        }
        if order:
            answer["rank_order"] = [asdict(row) for row in order]
        print(json.dumps(answer, indent=2))
        return 0 if can_train else 1
    width = max(len(check.name) for check in checks)
    for check in checks:
        mark = "ok     " if check.ok else "MISSING" if check.required else "absent "
        fix = f"; {check.fix}" if check.fix and not check.ok else ""
        print(f"{mark}  {check.name:<{width}}  {check.found}{fix}")
    for line in order_lines(order):
        print(line)
    print(f"pipeloom {__version__} {'can' if can_train else 'cannot'} train on this machine")
    return 0 if can_train else 1


def _rank_order(options: Any) -> list[AxisRow]:
    """The rank order that the options describe; none where all have their defaults."""
    given = {key.partition(".")[2]: options[key] for key in _MESH}
    parallel = replace(ParallelConfig(), **given)
    node = options.processes_per_node
    if node is not None and node < 1:
        raise InputError(f"--processes_per_node={node}: must be at least 1.")
    if parallel == ParallelConfig():
        return []
    return rank_order(TrainConfig(parallel=parallel), node)


def examine() -> list[Check]:
    """Every finding about this machine, in the order of the report."""
    python = f"{platform.python_version()}, {platform.platform()}"
    checks = [Check("python", sys.version_info >= (3, 11), python, True, "install Python 3.11")]
    for module, least in _REQUIRED.items():
        version, name = _version(module), _DISTRIBUTION.get(module, module)
        ok = version is not None and _numbers(version) >= _numbers(least)
        checks.append(Check(name, ok, version or "not installed", True, f"pip install '{name}>={least}'"))
    allow = "allow TCP on 127.0.0.1: the ranks meet there"
    checks += [
        *_torch_parts(),
        Check("cpu", True, _cores()),
        Check("memory", True, _memory()),
        Check("disk", True, f"{bytes_text(shutil.disk_usage(Path.cwd()).free)} free in the current directory"),
        _tried("loopback port", _try_loopback, "bound and reached", True, allow),
        _tried("shared memory", _try_shared_memory, "memfd, abstract sockets", fix="messages will go by gloo"),
    ]
    for module, (use, package) in _EXTRAS.items():
        version = _version(module)
        checks.append(Check(module, version is not None, version or use, fix=f"pip install {package}"))
    return checks


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(_DISTRIBUTION.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "0 (of unknown version)"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13)."""
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split("+")[0].split(".")[:2])


def _torch_parts() -> list[Check]:
    """Backends and devices, or the one finding that torch cannot be imported."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:  # OSError: a shared library of another machine
        fix = "install torch again, for this machine: pytorch.org"
        return [Check("torch import", False, unwrapped(str(error)), True, fix)]
    num_devices = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(num_devices)]
    names = "; ".join(f"{device.name}, {bytes_text(device.total_memory)}" for device in devices)

    shared: list[Check] = []
    if num_devices:
        from pipeloom.devices import sharing_of

        attempt = sharing_of(torch.device("cuda", 0)).check
        shared = [_tried("cuda ipc", attempt, "processes may share a GPU", fix="start one process per GPU")]
    gloo, nccl, mpi = (dist.is_available() and dist.is_backend_available(name) for name in ("gloo", "nccl", "mpi"))
    return [
        Check("gloo", gloo, "CPU collectives", True, "install a torch that is built with torch.distributed"),
        Check("nccl", nccl, "CUDA collectives", num_devices > 0, "install a CUDA build of torch"),
        Check("mpi", mpi, "not used by pipeloom"),
        Check(
            "cuda", num_devices > 0, names or "no device: ranks compute on the CPU", fix="pytorch.org has CUDA builds"
        ),
        *shared,
    ]


def _cores() -> str:
    usable = usable_cores()
    limit = ""
    with suppress(OSError, ValueError):  # a container may grant less time than it shows cores
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            limit = f", limited to the time of {int(quota) / int(period):.3g}"
    return f"{usable} cores usable of {os.cpu_count()}{limit}"


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parts = [f"{bytes_text(total)} in all"]
    with suppress(OSError, ValueError, KeyError):
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        parts.append(f"{bytes_text(int(rows['MemAvailable'].split()[0]) * 1024)} available")
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            parts.append(f"limited to {bytes_text(int(limit))}")
    return ", ".join(parts)


def _tried(name: str, attempt: Callable[[], None], found: str, required: bool = False, fix: str | None = None) -> Check:
    try:
        attempt()
    # AttributeError: this system's Python has no such function; RuntimeError: an error of torch
    except (OSError, AttributeError, RuntimeError, PipeloomError) as error:
        return Check(name, False, unwrapped(str(error)), required, fix)
    return Check(name, True, found, required, fix)


def _try_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=5).close()


def _try_shared_memory() -> None:
    """Do what the shared-memory transport does: send a descriptor of anonymous memory over an abstract socket."""
    descriptor = os.memfd_create("pipeloom-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as block:
            block[0] = 1
        name = f"\0pipeloom-doctor-{secrets.token_hex(8)}"
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
        ):
            server.bind(name)
            server.listen(1)
            client.connect(name)
            peer, _ = server.accept()
            with peer:
                socket.send_fds(client, [b"block"], [descriptor])
                _, received, _, _ = socket.recv_fds(peer, 16, 1)
            for copy in received:
                os.close(copy)
    finally:
        os.close(descriptor)
