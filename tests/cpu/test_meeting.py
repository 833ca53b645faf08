"""How processes meet in a store in which others met, or failed to meet, before them."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from pipeloom.errors import InputError, PeerLost
from pipeloom.processes import rendezvous
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.collectives import first_line
from pipeloom.processes.launcher import Membership, last_words
from pipeloom.processes.network import patience
from pipeloom.processes.network.interfaces import set_interface
from pipeloom.processes.network.patience import state_of, telling
from pipeloom.processes.rendezvous import fresh_part, join, open_store, own_store


def attempt(store: dist.Store, ranks: list[int], seconds: float) -> list[int | str]:
    """These of three ranks meet: as what number each came into its part of the store, or why it did not."""

    def come(rank: int) -> int | str:
        try:
            return fresh_part(store, rank, 3, seconds).add("came", 1)
        except PeerLost as error:
            return str(error)

    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(come, ranks))


@pytest.mark.parametrize("alive", [[], [0], [1], [2], [0, 1], [0, 2], [1, 2]])
def test_processes_that_are_started_again_meet_in_a_part_of_their_own(alive: list[int]) -> None:
    """Between whole attempts there are some of which processes died before all had met."""
    store = dist.HashStore()
    for _ in range(2):
        assert sorted(attempt(store, [0, 1, 2], 60)) == [1, 2, 3]
        answers = attempt(store, alive, 0.05)
        late = "from whose host no rank has come, did not start within 0.05 s"
        assert not alive or any(late in str(answer) for answer in answers)
    assert sorted(attempt(store, [0, 1, 2], 60)) == [1, 2, 3]


def test_ranks_after_one_that_does_not_come_get_their_part() -> None:
    """So they know which rank is missing."""
    late, came = attempt(dist.HashStore(), [0, 2], 0.5)
    assert str(late).startswith("rank 1, from whose host no rank has come, did not start within 0.5 s")
    assert came == 1


def test_a_wait_for_others_is_told_ever_more_rarely(capfd: pytest.CaptureFixture[str]) -> None:
    with telling(lambda: "rank 0 still waits", first_seconds=0.01):
        time.sleep(1.0)  # reading in between would lose a line that is written meanwhile
    printed = capfd.readouterr().err
    lines = [f"pipeloom: after {seconds} s rank 0 still waits" for seconds in ("0.01", "0.02", "0.04")]
    assert printed.splitlines()[:3] == lines


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


HANGS = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR2, file=2); print(flush=True); {}"


def meets_alone(rank: int, port: int, body: str | None, limit_seconds: float = 0.5) -> None:
    """What torchrun's agent does: start the ranks; one never meets the others, where `body` starts it at all."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    other = None
    if body is not None:
        command = [sys.executable, "-c", HANGS.format(body)]
        other = subprocess.Popen(command, env={**os.environ, "RANK": str(1 - rank)}, stdout=subprocess.PIPE)
        assert other.stdout is not None
        assert other.stdout.read(1)
    own = os.fork()
    if not own:
        member = Membership(rank, rank, 2, 2, f"tcp://127.0.0.1:{port}", BlackBox())
        with last_words(member):
            join(member, "gloo", limit_seconds)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(own, 0)[1])
    if other is not None:
        other.kill()
        other.wait()
    os._exit(code)


@pytest.mark.parametrize(
    ("body", "words", "shown"),
    [
        (
            None,
            "no process of it was found beside this one. Start one process per rank, and look for an error of rank 1",
            "",
        ),
        (
            "time.sleep(60)",
            r"its process \d+ has not come here. Its Python stack is above. Start the run again",
            'File "<string>", line 1 in <module>\n',
        ),
        (
            "import os; os.kill(os.getpid(), signal.SIGSTOP)",
            r"its process \d+ is stopped by SIGSTOP or a debugger. Continue it with `kill -CONT \d+`",
            "",
        ),
    ],
)
def test_a_rank_that_does_not_come_ends_the_start_with_one_line(
    body: str | None, words: str, shown: str, port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    process = multiprocessing.get_context("fork").Process(target=meets_alone, args=(0, port, body))
    process.start()
    process.join(60)
    assert process.exitcode == 1
    told = capfd.readouterr().err
    assert shown in told
    line = f"pipeloom: error: rank 0: rank 1 on {socket.gethostname()} did not start within 0.5 s, and {words}.\n"
    assert re.fullmatch(line, told.splitlines(keepends=True)[-1]), told
    assert told.count("pipeloom: ") == 1


def test_a_store_that_does_not_answer_ends_the_start_with_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        process = multiprocessing.get_context("fork").Process(target=meets_alone, args=(1, port, None))
        process.start()
        process.join(60)
        assert process.exitcode == 1
    place = f"127.0.0.1, port {port}, where the ranks meet: it answers, but"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"pipeloom: error: rank 1 did not start within 0.5 s: {place}")


def test_a_rank_ends_where_the_agent_that_had_the_store_has_ended(
    port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An agent's store listens before its ranks start; that of rank 0 may not listen yet."""
    monkeypatch.setattr(rendezvous, "REFUSED_SECONDS", 0.2)
    for agent, line in [("True", "has refused connections for 0.2 s"), ("False", "did not start within 1 s")]:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
        limit = 20.0 if agent == "True" else 1.0
        process = multiprocessing.get_context("fork").Process(target=meets_alone, args=(1, port, None, limit))
        process.start()
        process.join(60)
        assert process.exitcode == 1
        (told,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pipeloom: ")]
        assert told.startswith("pipeloom: error: rank 1")
        assert line in told


def test_only_refusals_on_end_say_that_no_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal, ended, tries = ConnectionRefusedError(), threading.Event(), list[OSError]()
    others = [TimeoutError(), ConnectionResetError(), socket.gaierror(), OSError(113, "No route to host")]
    answers = iter([answer for other in others for answer in (refusal, refusal, other)] + [refusal] * 3)

    def connect(*_: object) -> None:
        tries.append(next(answers))
        raise tries[-1]

    monkeypatch.setattr(patience, "_REFUSAL_GAP_SECONDS", 0.01)
    monkeypatch.setattr(socket, "create_connection", connect)
    with patience.noticing_refusals("host", 1, 0.03, ended.set):
        assert ended.wait(10)
    assert len(tries) == 15


def test_what_a_process_finds_where_the_ranks_meet() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert state_of("127.0.0.1", port).startswith("it answers")
    assert state_of("127.0.0.1", port).startswith("no process listens there")


def test_a_store_listens_at_its_own_address_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    member = Membership(0, 0, 2, 2, f"tcp://127.0.0.1:{port}", BlackBox())
    store = own_store(member, "127.0.0.1", port)
    assert store is not None
    assert open_store({"MASTER_PORT": f"{port}"}) is None
    TCPStore("127.0.0.1", port, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    assert own_store(replace(member, local_size=1), "127.0.0.1", port) is None  # other hosts know another address


def test_processes_of_one_host_use_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "_PIPELOOM_INTERFACE"):
        monkeypatch.setenv(name, "")  # what is set here ends with the test
        monkeypatch.delenv(name)
    store = dist.HashStore()
    set_interface(store, 0, 2, 2, "nowhere")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    set_interface(store, 0, 1, 0, "2001:db8::1")  # they meet again, on several hosts, where IPv4 leads nowhere
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    set_interface(store, 0, 2, 2, "nowhere")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


def test_what_gloo_saw_is_told_without_its_source_and_advice() -> None:
    seen = "Read error [10.77.0.2]:4809: Connection timed out"
    advice = "This is typically caused by a remote worker hanging or bugs in the application. Check the logs."
    assert first_line(RuntimeError(f"[/home/gloo/transport/tcp/pair.cc:537] {seen}. {advice}\nframe 0")) == seen


@pytest.mark.parametrize("known", [{}, {"MASTER_ADDR": "127.0.0.1"}])
def test_a_meeting_place_that_is_not_set_is_said(monkeypatch: pytest.MonkeyPatch, known: dict[str, str]) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="not MASTER_ADDR and MASTER_PORT, where the ranks meet"):
        join(Membership(0, 0, 2, 2, "env://", BlackBox()), "gloo", 5.0)
