"""How the processes of a run meet: through a part of a store that only this attempt uses.

torchrun restarts all processes when one fails. Its store may outlive them and keep their addresses, and a process that
reads an old address waits for a process that has ended. torchrun's restart count cannot tell attempts apart, since
every host counts for itself. So rank 0 draws a new number, and sends it to each rank that asks:

    rank 0                                                rank 2
      │ generation += 1                                     │ asked/2 += 1, now 5
      │ answer/2/4 = generation   (of a dead rank 2)        │ waits for answer/2/5
      │ answer/2/5 = generation ───────────────────────────▶│
      │ waits for generation/here/2 ◀───────────────────────│ has the generation

A start that takes too long ends with one line, which names the rank that has not come.
"""

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeloom.errors import InputError, PeerLost, unwrapped
from pipeloom.processes.cluster_environment import with_rank
from pipeloom.processes.collectives import is_lost_peer, noticing_lost_peers
from pipeloom.processes.launcher import HUNG, STACKS, Membership
from pipeloom.processes.network.arrivals import Arrivals, Missing
from pipeloom.processes.network.interfaces import LOOPBACK, VARIABLE, route_to, set_interface
from pipeloom.processes.network.patience import noticing_refusals, state_of, telling
from pipeloom.processes.network.sockets import open_sockets
from pipeloom.processes.watchdog import BACKGROUND_THREAD

_POLL_SECONDS = 0.01  # of rank 0, while other ranks start
_LEAVING_SECONDS = 5.0  # for threads that waited for a lost process
STARTING_SECONDS = 1800.0  # until all ranks have started
_BEYOND_SECONDS = 5.0  # after which a start ends that is blocked, in a call that does not know its limit
_STACK_SECONDS = 1.0  # for the stack of another rank
REFUSED_SECONDS = 15.0  # of refused connections, after which the agent that had the store counts as ended
_AGENT = "TORCHELASTIC_USE_AGENT_STORE"  # variable of torchrun: True: an agent has the store
_LISTEN = "0A"  # state of a socket in /proc/net/tcp


def join(member: Membership, backend: str, limit_seconds: float = STARTING_SECONDS) -> None:
    """Make the default process group of `member`'s run. Every process of the run calls it.

    Args:
        member: of the run.
        backend: of torch.distributed.
        limit_seconds: until all ranks have come. Then this process ends with a line about the first that has not.

    Raises:
        InputError: the environment does not say where the ranks meet.
        PeerLost: a process timed out.
    """
    rank, size, began = member.rank, member.world_size, time.monotonic()

    def ends(missing: Missing | None, otherwise: str) -> NoReturn:
        if missing is None:
            _end(member, f"rank {rank} did not start within {limit_seconds:g} s: {otherwise} Start the run again.")
        _end(member, _late(missing, limit_seconds))

    if member.launched:  # the launcher made the meeting place for this run
        store, _, _ = next(rendezvous(member.meeting, rank, size))
        store.set_timeout(timedelta(seconds=_torch_seconds(limit_seconds)))
        store = PrefixStore("pipeloom", store)
        arrivals = Arrivals(store, rank, size, size)
        arrivals.note()
    else:
        if member.meeting == "env://" and not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise InputError(
                "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT, where the ranks meet. Start the "
                "processes with torchrun, or set both to the host of rank 0 and a free port there."
            )
        host, port = _meeting_place(member.meeting)
        place = f"{host}, port {port}"

        def refused() -> NoReturn:
            _end(
                member,
                f"rank {rank}: {place}, where the ranks meet, has refused connections for {REFUSED_SECONDS:g} s: the "
                "torchrun that had the store there has ended. Start the run again.",
            )

        with (
            telling(
                lambda: (
                    f"rank {rank} still waits for {place}, where the ranks meet: {state_of(host, port)}. The place is "
                    "MASTER_ADDR and MASTER_PORT."
                ),
                limit_seconds=limit_seconds,
                at_limit=lambda: ends(None, f"{place}, where the ranks meet: {state_of(host, port)}."),
            ),
            ExitStack() as stack,
        ):
            if os.environ.get(_AGENT) == "True":  # that store listens before any rank starts
                stack.enter_context(noticing_refusals(host, port, REFUSED_SECONDS, refused))
            store = _store(member, host, port, limit_seconds)
        silent = f"the store at {place} does not answer: its process is stopped, or the network is cut."
        store = fresh_part(store, rank, size, limit_seconds, member.local_size, lambda: ends(None, silent))
        arrivals = Arrivals(store, rank, size, member.local_size)

    def connects() -> str:
        if (missing := arrivals.first_missing()) is not None:
            return f"rank {rank} still waits for {missing.name} to start{missing.state}"
        interface = os.environ.get(VARIABLE, "of gloo")
        return (
            f"rank {rank} still connects to the other ranks, by interface {interface}. Look whether a firewall is "
            f"between the hosts; {VARIABLE} sets another interface."
        )

    with (
        noticing_lost_peers(f"rank {rank} could not connect to the other ranks"),
        telling(
            connects,
            limit_seconds=limit_seconds - (time.monotonic() - began),
            at_limit=lambda: ends(arrivals.first_missing(), f"after all ranks had come, {connects()}"),
        ),
    ):
        if not member.launched:
            set_interface(store, rank, size, member.local_size, host)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def _store(member: Membership, host: str, port: int, limit_seconds: float) -> Store:
    """The store at the meeting place. Raises PeerLost where it cannot be reached."""
    rank, seconds = member.rank, _torch_seconds(limit_seconds)
    store = own_store(member, host, port, seconds) if rank == 0 and _AGENT not in os.environ else None
    if store is not None:
        return store
    with noticing_lost_peers(f"rank {rank} could not reach {host}, port {port}, where the ranks meet"):
        found = next(rendezvous(member.meeting, rank, member.world_size, timeout=timedelta(seconds=seconds)))
    met: Store = found[0]
    return met


def _torch_seconds(limit_seconds: float) -> float:
    """A time limit of torch for a store, which is not to end the start before this process does."""
    return max(STARTING_SECONDS, limit_seconds) + 10 * _BEYOND_SECONDS


def _late(missing: Missing, seconds: float) -> str:
    """What ends a start; a rank of this host prints its stack before."""
    if missing.process is not None:
        with suppress(ProcessLookupError):
            os.kill(missing.process, STACKS)
            time.sleep(_STACK_SECONDS)
    return f"{missing.name} did not start within {seconds:g} s{missing.state}. {missing.fix}"


def _end(member: Membership, text: str) -> NoReturn:
    """End this process, whose main thread is blocked."""
    if member.launched:  # the launcher prints the line, and ends all ranks
        member.black_box.last_words = text
        os._exit(HUNG)
    sys.stderr.write(f"pipeloom: error: {unwrapped(text)}\n")
    sys.stderr.flush()
    os._exit(1)


@contextmanager
def leaving_store(member: Membership | None) -> Iterator[None]:
    """After an error in the block, the store in which ranks of the own launcher met takes nothing any more.

    Process groups write into its file when they are destroyed. Where that fails, as it is too large for RLIMIT_FSIZE,
    torch ends the process with SIGABRT, and the error is never told.
    """
    try:
        yield
    except BaseException:
        if member is not None and member.launched:
            with open(os.devnull, "rb+") as nothing:
                os.dup2(nothing.fileno(), int(member.meeting.rpartition("/")[2]))
        raise


def own_store(member: Membership, host: str, port: int, seconds: float = STARTING_SECONDS) -> Store | None:
    """Rank 0's store, which listens at the address of `host` alone; None: other hosts may reach it by another address.

    A store of torch listens on all interfaces, without a password.
    """
    route = route_to(host)
    if route is None or (route.interface == LOOPBACK and member.local_size < member.world_size):
        return None
    with suppress(OSError), socket.create_server((route.address, port)) as server:
        return TCPStore(
            host,
            port,
            member.world_size,
            is_master=True,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    return None  # an address of another machine that passes connections on, or the port is taken


def _meeting_place(meeting: str) -> tuple[str, int]:
    """Host and port of an ``init_method``, ``env://`` or ``tcp://HOST:PORT``."""
    if meeting == "env://":
        port = os.environ.get("MASTER_PORT", "")
        return os.environ.get("MASTER_ADDR", "?"), int(port) if port.isdecimal() else 0
    place = urlsplit(meeting)
    return place.hostname or "?", place.port or 0


def cut_connections(others: Collection[str]) -> None:
    """End the connections of this process to other ones; whoever waits for it, or here for another, sees that.

    Args:
        others: sockets that stay open: those from before the process groups.
    """
    for name, descriptor in open_sockets().items():
        if name not in others:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:
                listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # gloo ends the process at an error
                if end.family in (socket.AF_INET, socket.AF_INET6) and not listens:
                    end.shutdown(socket.SHUT_RDWR)  # a group may have references that nobody can reach


def leave(others: Collection[str]) -> None:
    """Leave all process groups after the loss of a process, so that this one can join new ones.

    Whoever still waits for this process or a lost one, also in another thread or process, sees its connections end.

    Args:
        others: sockets that stay open: those from before the process groups.

    Raises:
        PeerLost: a thread still waits for another process.
    """
    gc.collect()  # what the error held: pipelines with their channels and groups
    if dist.is_initialized():
        if "nccl" in dist.get_backend_config() and dist.group.WORLD is not None:
            dist.group.WORLD.abort()  # it would wait for the lost process
        dist.destroy_process_group()
    cut_connections(others)
    for thread in threading.enumerate():
        if thread.name == BACKGROUND_THREAD:
            thread.join(_LEAVING_SECONDS)
            if thread.is_alive():
                raise PeerLost("a save in the background still waits for a rank that was lost")
    gc.collect()


def fresh_part(
    store: Store,
    rank: int,
    size: int,
    timeout_seconds: float = STARTING_SECONDS,
    local_size: int = 1,
    blocked: Callable[[], object] = lambda: None,
) -> Store:
    """A part of `store`, the same for the `size` processes that call it, which no earlier process has used.

    Args:
        store: where the processes meet.
        rank, size: of this process, and number of processes.
        timeout_seconds: until all have come.
        local_size: number of processes per host.
        blocked: called in a thread some seconds after the timeout, where the store does not answer.

    Raises:
        PeerLost: a process timed out.
    """
    part, missing, deadline = store, list(range(1, size)) if rank == 0 else [0], time.monotonic() + timeout_seconds

    def late() -> Missing:
        return Arrivals(part, rank, size, local_size).described(missing[0])

    with (
        noticing_lost_peers(f"rank {rank} lost the store where the ranks meet"),
        telling(
            lambda: f"rank {rank} still waits for {(awaited := late()).name} to start{awaited.state}",
            limit_seconds=timeout_seconds + _BEYOND_SECONDS,
            at_limit=blocked,
        ),
    ):
        if rank == 0:
            generation = store.add("pipeloom/generation", 1)
            part = PrefixStore(f"pipeloom/{generation}", store)
            arrivals = Arrivals(part, rank, size, local_size)
            arrivals.note()
            while left := [other for other in missing if not arrivals.has_come(other)]:
                missing = left
                if time.monotonic() > deadline:
                    raise PeerLost(_late(late(), timeout_seconds))
                for other in missing:
                    asked = store.add(f"pipeloom/asked/{other}", 0)
                    store.set(f"pipeloom/answer/{other}/{asked}", str(generation))
                time.sleep(_POLL_SECONDS)
        else:
            answer = f"pipeloom/answer/{rank}/{store.add(f'pipeloom/asked/{rank}', 1)}"
            try:
                store.wait([answer], timedelta(seconds=timeout_seconds))
            except RuntimeError as error:
                if time.monotonic() < deadline or not is_lost_peer(error):
                    raise
                raise PeerLost(_late(late(), timeout_seconds)) from error
            part = PrefixStore(f"pipeloom/{int(store.get(answer))}", store)
            Arrivals(part, rank, size, local_size).note()
    return part


def open_store(environment: Mapping[str, str]) -> str | None:
    """A line about the store of the run, if it listens on all interfaces of this machine; else None.

    torchrun's TCPStore has no password, and binds to all interfaces whatever the address of the rendezvous is.
    """
    port = with_rank(environment).get("MASTER_PORT", "")
    if not port.isdecimal():
        return None
    if {name for _, name in socket.if_nameindex()} <= {"lo"} or not _listens_everywhere(int(port)):
        return None
    return (
        f"MASTER_PORT={port}: the store in which the ranks met listens on all interfaces, without a password. On one "
        "machine, start pipeloom train without torchrun, which opens no port to other machines; on several, close the "
        "port with a firewall."
    )


def _listens_everywhere(port: int) -> bool:
    """Whether a process of this machine listens on the port of every address; False where /proc does not show it."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, _, number = local.partition(":")
                if state == _LISTEN and int(number, 16) == port and not address.strip("0"):
                    return True
    return False
