"""Elastic runs under pipeloom's own launcher: fewer ranks start again after a loss, and more of them later.

    generation 0    ranks 0 1 2 3 on slots 0 1 2 3    rank 2 is killed: all end, slot 2 is lost
    generation 1    ranks 0 1 2   on slots 0 1 3      SIGUSR2: the ranks save and end
    generation 2    ranks 0 1 2 3 on slots 0 1 2 3

A slot is a place on this machine, such as its GPU: the local rank of a process. The launcher holds the memory into
which ranks copy their state until the ranks of the next generation have read it and copied their own. No torch.
"""
