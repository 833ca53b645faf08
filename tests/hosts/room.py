"""`Room`: several hosts on this machine, each with a network, a name and processes of its own.

    host-0 (namespaces)                                          host-1
      eth0, a TUN device ──▶ `Network`, a thread of the test ──▶ eth0

Nothing of a host has a name outside of it, so nothing is left when the test's process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from tests.hosts.network import Link, Network

_KEEPER = Path(__file__).with_name("keeper.py")
_NAMESPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--time")
_CLOCK_SECONDS = 1_000_000  # by which clocks of hosts differ that count from their start


@dataclass(frozen=True)
class Host:
    """A host of a `Room`.

    Attributes:
        name, address: in the network.
        keeper: its first process.
    """

    name: str
    address: str
    keeper: int

    def enter(self) -> None:
        """Let this process, which has one thread, run on this host; it keeps its files and its number."""
        libc = ctypes.CDLL(None, use_errno=True)
        for namespace in ("net", "uts", "ipc", "time"):
            descriptor = os.open(f"/proc/{self.keeper}/ns/{namespace}", os.O_RDONLY)
            if libc.setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"setns {namespace}: {os.strerror(ctypes.get_errno())}")
            os.close(descriptor)

    def start(
        self, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; it ends with the host."""
        enter = ["nsenter", "--target", str(self.keeper), *_NAMESPACES, "--wd=" + os.getcwd()]
        return subprocess.Popen(
            [*enter, *command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )


class Room:
    """Hosts ``host-0``, ``host-1``, ... with the addresses 10.77.0.1, 10.77.0.2, ... and the network between them."""

    def __init__(self, hosts: Sequence[Host], network: Network, ends: Sequence[socket.socket]) -> None:
        self.hosts, self._network, self._ends = hosts, network, ends

    def link(self, source: int, target: int) -> Link:
        """The direction from one host to another, which may be changed."""
        return self._network.link(self.hosts[source].address, self.hosts[target].address)

    def links(self) -> Iterator[Link]:
        """All directions between two hosts."""
        for source, target in itertools.permutations(range(len(self.hosts)), 2):
            yield self.link(source, target)

    def cut(self, cut: bool = True) -> None:
        """Lose all packets between all hosts, or none again."""
        for link in self.links():
            link.cut = cut

    def delay(self, seconds: float) -> None:
        """Delay all packets between all hosts."""
        for link in self.links():
            link.delay_seconds = seconds

    def end(self, host: int) -> None:
        """End all processes of a host, and its network, without a word to others: as if its power went."""
        for other in range(len(self.hosts)):
            if other != host:
                self.link(host, other).cut = self.link(other, host).cut = True
        self._ends[host].shutdown(socket.SHUT_RDWR)


@contextmanager
def room(num_hosts: int, directory: Path, *, own_loopback: bool = False) -> Iterator[Room]:
    """A room of hosts. Skips the test, with the reason, where this machine allows no namespaces or network devices.

    Args:
        num_hosts: number of hosts.
        directory: for their tables of names.
        own_loopback: whether each host knows its own name as 127.0.1.1, as Debian sets it up.
    """
    names = {f"host-{number}": f"10.77.0.{number + 1}" for number in range(num_hosts)}
    with ExitStack() as stack:
        hosts, ends, devices = [], [], {}
        for name, address in names.items():
            table = directory / f"hosts-of-{name}"
            rows = {**names, **({name: "127.0.1.1"} if own_loopback else {}), "localhost": "127.0.0.1"}
            table.write_text("".join(f"{to} {other}\n" for other, to in rows.items()))
            here, there = socket.socketpair()
            stack.callback(here.close)
            with there:
                process = stack.enter_context(_keeper(name, address, table, there, _CLOCK_SECONDS * len(hosts)))
            stack.callback(here.shutdown, socket.SHUT_RDWR)
            _, descriptors, _, _ = socket.recv_fds(here, 2, 1)
            if not descriptors:
                assert process.stderr is not None
                reason = process.stderr.read().decode().strip().split("\n")[-1]
                pytest.skip(f"no hosts of namespaces on this machine: {reason}")
            devices[address] = descriptors[0]
            ends.append(here)
            hosts.append(Host(name, address, _child(process.pid)))
        network = Network(devices)
        stack.callback(network.close)
        yield Room(hosts, network, ends)


@contextmanager
def _keeper(
    name: str, address: str, table: Path, end: socket.socket, clock_seconds: int
) -> Iterator[subprocess.Popen[bytes]]:
    clock = [f"--{which}={clock_seconds}" for which in ("monotonic", "boottime")]
    command = ["unshare", *_NAMESPACES, *clock, "--fork", "--kill-child", "--mount-proc"]
    keeper = [sys.executable, "-I", "-S", str(_KEEPER), name, address, str(table)]
    with subprocess.Popen([*command, *keeper], stdin=end, stderr=subprocess.PIPE) as process:
        yield process


def _child(process: int) -> int:
    """The only child of a process."""
    return int(Path(f"/proc/{process}/task/{process}/children").read_text())
