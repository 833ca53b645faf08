"""First process of a host that a `Room` makes: an interface, names, and the end of all processes of the host.

It runs as process 1 of new namespaces, with a socket as standard input: `keeper.py NAME ADDRESS HOSTS`. It sends the
descriptor of its network device through the socket. When the socket closes, it ends, and the kernel ends the host.
"""

import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x1, 0x1000
SIOCSIFADDR, SIOCSIFNETMASK, SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8916, 0x891C, 0x8913, 0x8914, 0x1
MS_BIND = 0x1000


def inet(address: str) -> bytes:
    """A `sockaddr_in`."""
    return struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(address))


def raise_interface(ask: socket.socket, name: str, address: str | None = None) -> None:
    """Give an interface its address, and switch it on."""
    if address is not None:
        fcntl.ioctl(ask, SIOCSIFADDR, struct.pack("16s", name.encode()) + inet(address))
        fcntl.ioctl(ask, SIOCSIFNETMASK, struct.pack("16s", name.encode()) + inet("255.255.255.0"))
    flags = struct.unpack("16xH", fcntl.ioctl(ask, SIOCGIFFLAGS, struct.pack("16sH", name.encode(), 0))[:18])[0]
    fcntl.ioctl(ask, SIOCSIFFLAGS, struct.pack("16sH", name.encode(), flags | IFF_UP))


def main() -> None:
    name, address, hosts = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # processes whose parent has ended
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(hosts.encode(), b"/etc/hosts", None, MS_BIND, None):
        raise OSError(ctypes.get_errno(), "mount /etc/hosts")
    socket.sethostname(name)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        raise_interface(ask, "lo")
        raise_interface(ask, "eth0", address)
    with socket.socket(fileno=0) as room:
        socket.send_fds(room, [b"up"], [device])
        os.close(device)
        room.recv(1)


main()
