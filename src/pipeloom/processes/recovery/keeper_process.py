"""The keeper's process: holds anonymous memory of ranks until torchrun's agent ends. No pipeloom, no torch.

    python -I -S keeper_process.py NAME AGENT

It listens on the abstract socket NAME. A process of the same user sends the name of a memory, and gets descriptors of
its files, which are made when they are asked for first; `LIST` gets the names of all memories, one per line.
"""

import os
import select
import socket
import struct
import sys

LIST = "?"
NUM_FILES = 3  # of a memory: two copies of a state, and the notes of its rank
_MESSAGE_BYTES = 1 << 16
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def peer_is_own(connection: socket.socket) -> bool:
    """Whether the process at the other end is of the same user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())


def _answer(connection: socket.socket, memories: dict[str, list[int]]) -> None:
    name = connection.recv(_MESSAGE_BYTES).decode()
    if name == LIST:
        connection.send(("\n".join(memories) + "\n").encode())
        return
    if name not in memories:
        memories[name] = [os.memfd_create(f"pipeloom-{name}") for _ in range(NUM_FILES)]
    socket.send_fds(connection, [b"1"], memories[name])


def main() -> None:
    """Serve until the agent ends, unless another keeper does already."""
    name, agent = sys.argv[1], int(sys.argv[2])
    memories: dict[str, list[int]] = {}
    try:
        end = os.pidfd_open(agent)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")
    except OSError:  # the agent has ended, or there is a keeper
        return
    listener.listen(64)
    while end not in select.select([listener.fileno(), end], [], [])[0]:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.settimeout(10.0)
                if peer_is_own(connection):
                    _answer(connection, memories)
            except (OSError, ValueError):  # whoever asked has ended
                continue


if __name__ == "__main__":
    main()
