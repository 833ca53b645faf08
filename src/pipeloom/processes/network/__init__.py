"""How processes of several hosts reach each other.

arrivals        which ranks have come to the store where they meet, and what is known of the others
interfaces      the network interface that leads to the other hosts, for gloo
patience        what a process waits for while others start, told after a while
sockets         the sockets of this process, and how soon the kernel gives up a connection that carries nothing
"""
