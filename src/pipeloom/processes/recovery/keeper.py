"""`Keeper`: memory of ranks that outlives their processes under torchrun, which restarts all processes of an agent.

    torchrun's agent ──starts──> rank 0, rank 1     again after each failure
       ▲                            │ start, and ask for descriptors
       └─────── ends with ──── keeper                holds anonymous memory

The keeper has a session of its own, so that the agent does not end it with the ranks, and nothing to clean up: the
kernel frees its memory when it ends.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from pipeloom.common.process_place import stat_fields
from pipeloom.errors import RunError
from pipeloom.processes.recovery import keeper_process
from pipeloom.processes.recovery.lifeline import Memories

_START_SECONDS = 30.0
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.005
_MESSAGE_BYTES = 1 << 16


class Keeper:
    """The keeper of this process's agent, its parent process; started where there is none.

    Raises:
        RunError: it cannot be started.
    """

    def __init__(self) -> None:
        agent = os.getppid()
        fields = stat_fields(agent)
        self._name = f"pipeloom-keeper-{os.getuid()}-{agent}-{fields[19] if fields else ''}"
        if self._asked(keeper_process.LIST) is None:
            subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(keeper_process.__file__)), self._name, str(agent)],
                env={name: value for name, value in os.environ.items() if name != "RANK"},  # it is none
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            deadline = time.monotonic() + _START_SECONDS
            while self._asked(keeper_process.LIST) is None:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"--recover: the process that keeps copies did not answer within {_START_SECONDS:g} s. Start "
                        "the run again, or remove --recover."
                    )
                time.sleep(_POLL_SECONDS)

    def memories(self, name: str) -> Memories:
        """The memory of this name, which is made if there is none."""
        found = self._asked(name)
        if found is None:
            raise RunError("--recover: the process that keeps copies has ended, or is stopped. Start the run again.")
        *copies, notes = found[1]
        return Memories(tuple(copies), notes)

    @property
    def names(self) -> list[str]:
        """The names of all memories."""
        found = self._asked(keeper_process.LIST)
        return [] if found is None else found[0].split()

    def _asked(self, name: str) -> tuple[str, list[int]] | None:
        """The keeper's answer, a text and descriptors; None: there is no keeper."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
            try:
                end.settimeout(_ANSWER_SECONDS)
                end.connect(f"\0{self._name}")
                if not keeper_process.peer_is_own(end):
                    return None
                end.send(name.encode())
                data, descriptors, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, keeper_process.NUM_FILES)
            except OSError:
                return None
        return (data.decode(), list(descriptors)) if data else None
