"""The launcher with small ranks that need no torch: how they are placed, lost, ended and reported."""

from __future__ import annotations

import ctypes
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeloom.common.cores import usable_cores
from pipeloom.errors import InputError
from pipeloom.processes import launcher
from pipeloom.processes.black_box import BlackBox
from pipeloom.processes.preemption import PREEMPTED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the launcher stands on Linux")

PR_SET_CHILD_SUBREAPER = 36

RANK = """\
import os, signal, sys, time
from pathlib import Path
from pipeloom.errors import InputError, PeerLost, RunError
from pipeloom.processes import launcher

member = launcher.membership(os.environ)
rank, box, here = member.rank, member.black_box, Path(sys.argv[1])

def wait_for_all():
    (here / f"{rank}-starts").write_text(str(os.getpid()))
    (here / f"{rank}-starts").rename(here / f"ready-{rank}")  # others see the file with all that it holds
    while len(list(here.glob("ready-*"))) < member.world_size:
        time.sleep(0.005)

with launcher.last_words(member):
"""

LAUNCH = """\
import sys
from pipeloom.processes.launcher import launch
from pipeloom.processes.preemption import Request
names = [f"rank {rank}" for rank in range(int(sys.argv[1]))]
request, recoveries = Request(globals().get("SECONDS", 0.0)), globals().get("RECOVERIES", 0)
code = launch(names, sys.argv[2:], request=request, recoveries=recoveries)
assert "torch" not in sys.modules
sys.exit(code)
"""

# Its standard input becomes the terminal of its session, one that stops background processes that write to it.
ON_A_TERMINAL = """\
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
mode = termios.tcgetattr(0)
mode[3] |= termios.TOSTOP
termios.tcsetattr(0, termios.TCSANOW, mode)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Start a launcher of ranks that run `body`; their files are in tmp_path."""

    def run(body: str, num_ranks: int = 2, before: str = "", **more: Any) -> subprocess.Popen[str]:
        script = tmp_path / "rank.py"
        script.write_text(RANK + "".join(f"    {line}\n" for line in body.strip().splitlines()))
        words = [sys.executable, "-c", before + LAUNCH, str(num_ranks), str(script), str(tmp_path)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(words, text=True, **{**streams, **more})

    return run


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def wait_for(files: list[Path]) -> None:
    while not all(file.exists() and file.read_text() for file in files):
        time.sleep(0.005)


def test_ranks_get_their_place_and_share_the_cores(start: Start) -> None:
    body = "names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'GLOO_SOCKET_IFNAME')\n"
    body += "line = ' '.join([*(os.environ[name] for name in names), member.meeting[:21]])\n"
    body += "os.write(1, f'{line}\\n'.encode())"  # in one piece
    code, out, err = finish(start(body, 3))
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"{r} {r} 3 lo file:///proc/self/fd/" for r in range(3)]


@pytest.mark.skipif(usable_cores() == 1, reason="one core")
def test_threads_of_a_rank_sleep_soon_unless_the_user_says_how_they_wait(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    body = "os.write(1, os.environ.get('GOMP_SPINCOUNT', 'unset').encode() + b'\\n')"
    assert finish(start(body, 1))[:2] == (0, "1000\n")
    assert finish(start(body, usable_cores()))[1].split() == ["unset"] * usable_cores()
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert finish(start(body, 1))[1] == "unset\n"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "20")
    assert finish(start(body, 1))[1] == "20\n"


def test_the_meeting_place_is_one_file_for_all_ranks(start: Start) -> None:
    body = """
with open(member.meeting.removeprefix("file://"), "ab", buffering=0) as file: file.write(b"x")
wait_for_all()
os.write(1, f'{len(open(member.meeting.removeprefix("file://"), "rb").read())}\\n'.encode())
"""
    code, out, _ = finish(start(body))
    assert (code, out.split()) == (0, ["2", "2"])


def test_a_killed_rank_is_named_with_step_and_action(start: Start) -> None:
    body = """
box.phase = "step 12"
box.action_buffer[:4] = b"1B3\\0"
wait_for_all()
if rank == 1: os.kill(os.getpid(), signal.SIGBUS)
while not (here / "never").exists(): time.sleep(0.005)
"""
    code, _, err = finish(start(body, 3))
    assert code == 1
    assert err.startswith("pipeloom: error: rank 1 was killed by SIGBUS (is a disk or /dev/shm full, or ")
    assert err.endswith("?) in step 12, last action 1B3; all ranks were ended\n")


@pytest.mark.parametrize("end", ["sys.exit(0)", "os._exit(0)"])
def test_a_rank_that_ends_without_an_error_before_the_run_is_complete_is_named(start: Start, end: str) -> None:
    body = f"""
box.phase = "step 11"
wait_for_all()
if rank == 1: {end}
raise PeerLost("rank 1 ended while this rank waited for it")
"""
    code, _, err = finish(start(body))
    how = "rank 1 ended with exit code 0 in step 11, before the run was complete"
    assert (code, err) == (1, f"pipeloom: error: {how}; all ranks were ended\n")
    code, _, err = finish(start(f"box.phase = 'step 11'\n{end}", 1))  # where no other rank waits for it
    assert (code, err) == (1, f"pipeloom: error: {how.replace('rank 1', 'rank 0')}; all ranks were ended\n")


def test_ranks_killed_at_once_are_all_named(start: Start) -> None:
    """The launcher is stopped while they are killed, so that it cannot come between."""
    body = """
wait_for_all()
victims = [int((here / f"ready-{other}").read_text()) for other in (1, 2)]
if rank == 0:
    os.kill(os.getppid(), signal.SIGSTOP)
    for victim in victims: os.kill(victim, signal.SIGKILL)
    while any(Path(f"/proc/{victim}/stat").read_text().split()[2] != "Z" for victim in victims): time.sleep(0.005)
    os.kill(os.getppid(), signal.SIGCONT)
time.sleep(60)
"""
    code, _, err = finish(start(body, 3))
    assert code == 1
    assert err.startswith("pipeloom: error: rank 1 was killed by SIGKILL")
    assert err.endswith("; also killed: rank 2 by SIGKILL; all ranks were ended\n")


def test_a_killed_rank_is_started_again_and_so_is_one_that_does_not_come(start: Start) -> None:
    body = """
line = member.lifeline
box.phase = "step 12"
if line.generation == 0:
    wait_for_all()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2: time.sleep(60)
    assert line.noticed(PeerLost(""))
else:
    (here / f"again-{rank}").touch()
before = os.fstat(line.copies[1]).st_size
os.truncate(line.copies[1], before + 1)
meeting, loss = line.meet()
os.write(1, f"{os.stat(meeting.removeprefix('file://')).st_ino} {before} {loss.text}\\n".encode())
"""
    before = "from pipeloom.processes.recovery import recoveries\nrecoveries._READY_SECONDS = 0.5\nRECOVERIES = 1\n"
    process = start(body, 3, before=before)
    here = Path(str(process.args[-1]))  # type: ignore[index]
    code, out, err = finish(process)
    assert code == 0, err
    assert sorted(path.name for path in here.glob("again-*")) == ["again-1", "again-2"]
    (line,) = set(out.splitlines())  # of all ranks: they meet in one place
    assert re.fullmatch(r"\d+ 0 rank 1 was killed by SIGKILL \(out of memory\?\) in step 12", line)
    first, second = err.splitlines()
    assert "; it is started again, and the other ranks keep their processes (recovery 1 of at most 1)" in first
    assert re.search(r"rank 2 \(process \d+\) was not ready to go on 0.5 s after the loss; it is killed$", second)


def test_a_rank_that_stops_while_it_starts_again_is_told_and_killed(start: Start) -> None:
    body = """
line = member.lifeline
if line.generation == 0:
    box.phase = "step 12"
    wait_for_all()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    assert line.noticed(PeerLost(""))
elif not (here / "stopped").exists():
    (here / "stopped").touch()
    os.kill(os.getpid(), signal.SIGSTOP)
line.meet()
"""
    before = "from pipeloom.processes.recovery import recoveries\nrecoveries._START_SECONDS = 2\nRECOVERIES = 9\n"
    code, _, err = finish(start(body, before=before))
    assert code == 0, err
    assert re.search(r"rank 1 \(process \d+\) was stopped by SIGSTOP; the run waits for it", err), err
    assert re.search(r"rank 1 \(process \d+\) was started again, but not ready after 2 s; it is killed\n", err), err


@pytest.mark.parametrize("ended_by", ["save", "time", "signal"])
def test_a_signal_in_a_recovery_is_kept_until_all_ranks_are_ready(start: Start, tmp_path: Path, ended_by: str) -> None:
    body = """
from pipeloom.processes.preemption import PREEMPTED, Preemption
with Preemption(60.0, rank, box) as preemption:
    line = member.lifeline
    if line.generation == 0:
        box.phase = "step 12"
        wait_for_all()
        if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
        assert line.noticed(PeerLost(""))
    else:
        (here / "again").touch()
        while not (here / "go").exists(): time.sleep(0.005)
    line.meet()
    assert not preemption.asked
    if rank == 1: time.sleep(0.1)  # the other one is ready before
    assert not preemption.asked
    box.phase = "setup"
    while not preemption.asked: time.sleep(0.005)
launcher.leave(PREEMPTED)
"""
    process = start(body, before=f"RECOVERIES, SECONDS = 1, {0.3 if ended_by == 'time' else 60.0}\n")
    while not (tmp_path / "again").exists():
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    if ended_by == "save":
        time.sleep(0.2)
        (tmp_path / "go").touch()
    elif ended_by == "signal":
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    warning, *lines = err.splitlines()
    assert warning.endswith("the other ranks keep their processes (recovery 1 of at most 1)")
    name = "SIGINT" if ended_by == "signal" else "SIGTERM"
    assert (code, lines) == (
        (PREEMPTED, [])
        if ended_by == "save"
        else (128 + signal.Signals[name], [f"pipeloom: {name}: all ranks were ended, in a recovery"])
    )


def test_ranks_that_are_killed_during_a_recovery_are_named(start: Start) -> None:
    body = """
line = member.lifeline
if line.generation == 0:
    box.phase = "step 12"
    wait_for_all()
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    assert line.noticed(PeerLost(""))
    if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
elif rank == 2:
    (here / "again").touch()
elif line.generation == 1 and not (here / "once").exists():
    (here / "once").touch()
    while not (here / "again").exists(): time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
line.meet()
"""
    code, _, err = finish(start(body, 3, before="RECOVERIES = 3\n"))
    assert code == 0, err
    kept = "it is started again, and the other ranks keep their processes"
    assert err.replace("pipeloom: warning: ", "").replace(
        " was killed by SIGKILL (out of memory?)", ""
    ).splitlines() == [
        f"rank 1 in step 12; {kept} (recovery 1 of at most 3)",
        "rank 2 in step 12; it is started again (recovery 1 of at most 3)",
        "rank 1 in its start; it is started again (recovery 2 of at most 3)",
    ]


def test_a_rank_that_is_killed_again_and_again_ends_the_run(start: Start) -> None:
    body = """
line = member.lifeline
if line.generation == 0:
    box.phase = "step 12"
    wait_for_all()
else:
    line.meet()
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
while line.noticed(PeerLost("")): line.meet()
"""
    code, _, err = finish(start(body, before="RECOVERIES = 2\n"))
    assert code == 1
    *warnings, line = err.splitlines()
    assert [re.findall(r"recovery \d of at most 2", each) for each in warnings] == [
        ["recovery 1 of at most 2"],
        ["recovery 2 of at most 2"],
    ]
    assert line.endswith("rank 1 was killed by SIGKILL (out of memory?) in its start; all ranks were ended")


def test_the_rank_that_hangs_is_named_and_not_who_says_so(start: Start) -> None:
    body = """
wait_for_all()
if rank == 1:
    box.last_words = "rank 0 hangs in step 3."
    launcher.leave(launcher.HUNG)
time.sleep(60)
"""
    code, _, err = finish(start(body))
    assert (code, err) == (1, "pipeloom: error: rank 0 hangs in step 3. All ranks were ended.\n")


def test_where_all_ranks_are_stopped_the_launcher_ends_them(start: Start) -> None:
    body = "box.limit_seconds = 0.2\nwait_for_all()\nos.kill(os.getpid(), signal.SIGSTOP)"
    code, _, err = finish(
        start(body, before="from pipeloom.processes.launching import ends\nends._WATCHDOG_SECONDS = 0\n")
    )
    assert code == 1
    assert "was stopped by SIGSTOP; the run waits for it, and ends after 0.2 s without progress. Continue" in err
    assert re.search(r"pipeloom: error: rank \d \(process \d+\) was stopped for more than 0.2 s; all ranks", err), err


def test_the_rank_that_could_not_save_is_named(start: Start) -> None:
    body = """
from pipeloom.errors import CheckpointError
wait_for_all()
error = CheckpointError("the checkpoint was not saved: rank 1: no space")
error.rank = 1
raise RunError(str(error)) from error
"""
    code, _, err = finish(start(body, 3))
    line = "rank 1 failed in its start: the checkpoint was not saved: rank 1: no space; all ranks were ended"
    assert (code, err) == (1, f"pipeloom: error: {line}\n")


def test_a_rank_ends_with_the_agent_of_torchrun(tmp_path: Path) -> None:
    note = tmp_path / "process"
    words = (
        "import os, time\nfrom pipeloom.processes import launcher\n"
        "if os.fork(): time.sleep(60)\n"
        "launcher.membership({'RANK': '0', 'WORLD_SIZE': '1', 'TORCHELASTIC_RUN_ID': 'x'})\n"
        f"open({str(note)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    agent = subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE)
    wait_for([note])
    agent.kill()
    agent.communicate(timeout=30)  # the pipe is closed when the rank has ended


ADOPTED = """
import os, sys, time
while os.getppid() != int(sys.argv[1]): time.sleep(0.01)
from pipeloom.cli import main
sys.exit(main(["train", "--help"]))
"""
ADOPTS = f"""
sleep $1
(TORCHELASTIC_RUN_ID=x RANK=3 {sys.executable} -c '{ADOPTED}' $$ &)
exec >&- 2>&-
read line
"""


@pytest.mark.parametrize(
    ("name", "program", "seconds", "variables", "ends"),
    [
        ("systemd", "service", 0.6, {}, True),
        ("systemd", "torchrun", 0.6, {}, False),  # process 1 of a container may be the agent itself
        ("systemd", "service", 0, {}, False),  # or start just before the rank, inside the container
        ("systemd", "service", 0.6, {"TORCHELASTIC_RUN_ID": "x"}, False),
        ("wrapper", "service", 0.6, {}, False),  # a shell between the agent and the rank
    ],
)
def test_a_rank_whose_agent_ended_before_it_began_ends_at_once(
    name: str, program: str, seconds: float, variables: dict[str, str], ends: bool, tmp_path: Path
) -> None:
    """A subreaper adopts the rank, as process 1 does."""
    (tmp_path / name).symlink_to("/bin/sh")
    with subprocess.Popen(
        ["sh", "-c", ADOPTS, program, f"{seconds}"],
        executable=tmp_path / name,
        env={**os.environ, **variables},
        preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1),  # noqa: PLW1509  # no other threads
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        out, err = parent.stdout.read(), parent.stderr.read()
    assert out.startswith("usage: pipeloom train") != ends
    assert err == ends * "pipeloom: error: rank 3: the torchrun that started it has ended. Start the run again.\n"


def test_ranks_of_torchrun_killed_at_once_are_all_named(tmp_path: Path) -> None:
    """On the second of two machines, whose ranks are 4 to 7."""
    body = """
box.phase = "step 9"
(here / f"starting-{rank}").write_text(str(os.getpid()))
(here / f"starting-{rank}").rename(here / f"ready-{rank}")
while len(list(here.glob("ready-*"))) < member.local_size: time.sleep(0.005)
if rank != 5: time.sleep(60)
for other in (4, 6): os.kill(int((here / f"ready-{other}").read_text()), signal.SIGKILL)
raise PeerLost("rank 4 ended while rank 5 waited for it")
"""
    script = tmp_path / "rank.py"
    script.write_text(RANK + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    agent = (
        "import os, subprocess, sys\n"
        "own = {**os.environ, 'TORCHELASTIC_RUN_ID': 'x', 'WORLD_SIZE': '8', 'LOCAL_WORLD_SIZE': '4'}\n"
        "places = [{**own, 'RANK': f'{4 + each}', 'LOCAL_RANK': f'{each}'} for each in range(4)]\n"
        "ranks = [subprocess.Popen([sys.executable, *sys.argv[2:]], env=place) for place in places]\n"
        "code = ranks[1].wait()\n"
        "ranks[3].kill()\n"
        "sys.exit(code)\n"
    )
    command = [sys.executable, "-c", agent, "torchrun", str(script), str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    told = "rank 5 in step 9: rank 4 ended while rank 5 waited for it; also ended: rank 6"
    assert (done.returncode, done.stderr) == (1, f"pipeloom: error: {told}\n")


@pytest.mark.parametrize(("program", "local_rank", "starts"), [("torchrun", 0, 1), ("torchrun", 1, 2), ("mine", 0, 2)])
def test_no_restart_of_torchrun_is_spent_on_the_same_refusal(
    program: str, local_rank: int, starts: int, tmp_path: Path
) -> None:
    """The first rank of an agent ends it; a program that is no agent is left alone."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": local_rank, "TORCHELASTIC_MAX_RESTARTS": 1}
    words = (
        "import os, subprocess, sys\n"
        "for count in range(2):\n"
        f"    place = {{**{variables!r}, 'TORCHELASTIC_RESTART_COUNT': count}}\n"
        "    place = {name: str(value) for name, value in place.items()}\n"
        "    words = [sys.executable, '-m', 'pipeloom', 'train', '--schedule=2f1b']\n"
        "    assert subprocess.run(words, env={**os.environ, **place}).returncode == 2\n"
    )
    command = [sys.executable, "-c", words, program]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == (0 if starts == 2 else -signal.SIGTERM)
    assert done.stderr.count("schedule '2f1b' is unknown") == starts
    assert done.stderr.count("torchrun is ended: its restarts would meet the same error") == (starts == 1)


def test_the_cause_is_named_and_not_who_lost_its_peer(start: Start) -> None:
    body = """
box.phase = "step 3"
wait_for_all()
if rank != 2: raise PeerLost("rank 2 went away")
time.sleep(0.8)  # the others end first
raise RunError("the disk is full")
"""
    code, _, err = finish(start(body, 3))
    assert (code, err) == (1, "pipeloom: error: rank 2 failed in step 3: the disk is full; all ranks were ended\n")


def test_where_all_have_lost_a_peer_one_of_them_is_named(start: Start) -> None:
    code, _, err = finish(start("raise PeerLost('nobody came')", 3))
    assert (code, err) == (1, "pipeloom: error: rank 0 failed in its start: nobody came; all ranks were ended\n")


def test_bad_input_in_a_rank_is_exit_code_2_and_said_once(start: Start) -> None:
    code, _, err = finish(start("raise InputError('no data in x: name a directory that has some')", 3))
    assert (code, err) == (2, "pipeloom: error: no data in x: name a directory that has some\n")


def test_an_unexpected_error_shows_its_traceback_and_one_line(start: Start) -> None:
    code, _, err = finish(start("wait_for_all()\nif rank == 0: 1 / 0\ntime.sleep(60)"))
    assert code == 1
    assert err.count("Traceback") == 1
    assert "rank 0 failed in its start: ZeroDivisionError: division by zero; all ranks were ended" in err


def test_a_rank_that_ignores_sigterm_is_killed(start: Start) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wait_for_all()
if rank == 0: os._exit(7)
time.sleep(60)
"""
    code, _, err = finish(start(body))
    assert code == 1
    assert "rank 0 failed in its start: exit code 7" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks(start: Start, tmp_path: Path, number: signal.Signals) -> None:
    process = start("box.phase = 'step 5'\nwait_for_all()\ntime.sleep(60)")
    wait_for([tmp_path / f"ready-{rank}" for rank in range(2)])
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err == f"pipeloom: {number.name}: all ranks were ended, in step 5\n"


def test_signals_that_come_together_end_all_ranks_once(start: Start, tmp_path: Path) -> None:
    process = start("wait_for_all()\ntime.sleep(60)")
    wait_for([tmp_path / f"ready-{rank}" for rank in range(2)])
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
        process.send_signal(number)
    code, _, err = finish(process)
    first = signal.Signals(code - 128)
    assert err == f"pipeloom: {first.name}: all ranks were ended\n"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    """As under `nohup`, whose terminal may be closed, and for a command that a script runs with `&`."""
    body = "wait_for_all()\nwhile not (here / 'go').exists(): time.sleep(0.005)"
    process = start(body, before=f"import signal\nsignal.signal({number:d}, signal.SIG_IGN)\n")
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    wait_for(ready)
    for target in (process.pid, *(int(file.read_text()) for file in ready)):
        os.kill(target, number)
    (tmp_path / "go").touch()
    assert finish(process) == (0, "", "")


def test_an_interrupted_rank_is_named(start: Start) -> None:
    """Whoever notices that it is gone is not the cause, however long a KeyboardInterrupt would take to unwind."""
    body = """
box.phase = "step 4"
wait_for_all()
if rank != 1: raise PeerLost("rank 1 went away")
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
finally:
    time.sleep(3)
"""
    code, _, err = finish(start(body, 3))
    assert (code, err) == (1, "pipeloom: error: rank 1 was killed by SIGINT in step 4; all ranks were ended\n")


def test_a_stopped_rank_is_told_of_and_goes_on(start: Start, tmp_path: Path) -> None:
    process = start("wait_for_all()\nif rank == 1:\n    for _ in range(2): os.kill(os.getpid(), signal.SIGSTOP)")
    assert process.stderr is not None
    for _ in range(2):
        line = process.stderr.readline()
        number = int((tmp_path / "ready-1").read_text())
        assert line.startswith(f"pipeloom: warning: rank 1 (process {number}) was stopped by SIGSTOP"), line
        assert f"`kill -CONT {number}`" in line
        os.kill(number, signal.SIGCONT)
    assert finish(process) == (0, "", "")


def test_a_terminal_with_tostop_stops_no_rank(start: Start) -> None:
    """Ranks are no foreground processes, and their lines are shown all the same."""
    try:
        master, slave = pty.openpty()
    except OSError:
        pytest.skip("no pseudo-terminals here")
    streams = {"stdin": slave, "stdout": slave, "start_new_session": True}
    process = start("os.write(1, f'rank {rank}\\n'.encode())", before=ON_A_TERMINAL, **streams)
    try:
        code, _, err = finish(process)
        assert (code, err) == (0, "")
        shown = b""
        while shown.count(b"\n") < 2 and select.select([master], [], [], 10)[0]:  # it comes in pieces
            shown += os.read(master, 1000)
        assert sorted(shown.decode().split("\r\n")) == ["", "rank 0", "rank 1"]
    finally:
        process.kill()
        os.close(master)
        os.close(slave)


def test_ranks_end_with_a_killed_launcher(start: Start, tmp_path: Path) -> None:
    process = start("wait_for_all()\ntime.sleep(60)")
    files = [tmp_path / f"ready-{rank}" for rank in range(2)]
    wait_for(files)
    process.kill()
    finish(process)
    for file in files:  # the fixture of all tests fails if one is left
        assert file.read_text().isdecimal()


def test_a_rank_whose_launcher_is_gone_ends_at_once() -> None:
    descriptors = [os.memfd_create(name) for name in ("meeting", "box")]
    try:
        os.truncate(descriptors[1], BlackBox.SIZE)
        place = {"RANK": "0", "WORLD_SIZE": "1", "_PIPELOOM_LAUNCHED": f"1:{descriptors[0]}:{descriptors[1]}"}
        words = "import os; from pipeloom.processes import launcher; launcher.membership(os.environ); print('alive')"
        done = subprocess.run(
            [sys.executable, "-c", words],
            env={**os.environ, **place},
            pass_fds=descriptors,
            capture_output=True,
            check=False,
        )
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert (done.returncode, done.stdout) == (1, b"")


def test_membership_of_the_environment() -> None:
    assert launcher.membership({}) is None
    assert launcher.membership({"RANK": "3"}) is None
    member = launcher.membership({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"})
    assert member is not None
    assert (member.rank, member.local_rank, member.world_size) == (3, 1, 4)
    assert (member.meeting, member.launched) == ("env://", False)
    with pytest.raises(InputError, match="RANK='x': must be an integer of at least 0"):
        launcher.membership({"RANK": "x", "WORLD_SIZE": "4"})
    with pytest.raises(InputError, match=r"^RANK=4: must be below WORLD_SIZE=4\. Start"):
        launcher.membership({"RANK": "4", "WORLD_SIZE": "4"})


def test_the_black_box_cuts_what_is_too_long() -> None:
    descriptor = os.memfd_create("box")
    try:
        os.truncate(descriptor, BlackBox.SIZE)
        box = BlackBox(descriptor)
        box.phase = "evaluation " * 40
        box.last_words = "two\nlines " + "ü" * 5000
        box.action_buffer[:6] = b"12B34\0"
        assert box.action == "12B34"
        assert len(box.phase) == 127
        assert box.last_words.startswith("two lines üü")
        box.phase = "step 1"
        assert (box.phase, box.action) == ("step 1", "12B34")
    finally:
        os.close(descriptor)
