"""Who sends what, step by step: functions of the number of ranks. The root is rank 0."""

from pipeloom.plan.collectives.sends import Send, Step, transposed


def levels(ranks: int) -> int:
    """log2, rounded up."""
    return (ranks - 1).bit_length()


def chain_broadcast(ranks: int) -> tuple[Step, ...]:
    """Chunk c leaves rank 0 in step c, and is passed on in the step after its arrival."""
    return tuple(
        tuple(Send(rank, rank + 1, (step - rank,)) for rank in range(ranks - 1) if 0 <= step - rank < ranks)
        for step in range(2 * (ranks - 1))
    )


def chain_gather(ranks: int) -> tuple[Step, ...]:
    """In every step, each rank passes on the chunk that came last."""
    return tuple(
        tuple(Send(rank, rank - 1, (rank + step,)) for rank in range(1, ranks - step)) for step in range(ranks - 1)
    )


def ring_all_gather(ranks: int) -> tuple[Step, ...]:
    """Each chunk travels around the ring."""
    return tuple(
        tuple(Send(rank, (rank + 1) % ranks, ((rank - step) % ranks,)) for rank in range(ranks))
        for step in range(ranks - 1)
    )


def ring_reduce_scatter(ranks: int) -> tuple[Step, ...]:
    """A sum begins at the rank behind its owner, and travels around the ring to it."""
    return tuple(
        tuple(Send(rank, (rank + 1) % ranks, ((rank - step - 1) % ranks,), True) for rank in range(ranks))
        for step in range(ranks - 1)
    )


def pairwise(ranks: int) -> tuple[Step, ...]:
    """In step s, each rank sends to the rank s behind it."""
    return tuple(
        tuple(Send(rank, to := (rank + step) % ranks, (rank * ranks + to,)) for rank in range(ranks))
        for step in range(1, ranks)
    )


def binomial_broadcast(ranks: int) -> tuple[Step, ...]:
    """Ranks that have the tensor send it to the rank half as far away as in the step before."""
    return tuple(
        tuple(Send(rank, rank + far, (0,)) for rank in range(0, ranks - far, 2 * far))
        for far in reversed([1 << level for level in range(levels(ranks))])
    )


def binomial_gather(ranks: int) -> tuple[Step, ...]:
    """Neighbouring groups join: the first rank of the second group sends all chunks of its group."""
    return tuple(
        tuple(Send(rank, rank - far, tuple(range(rank, min(rank + far, ranks)))) for rank in range(far, ranks, 2 * far))
        for far in [1 << level for level in range(levels(ranks))]
    )


def bruck_all_gather(ranks: int) -> tuple[Step, ...]:
    """In the step of distance d, each rank has d chunks, and receives as many new ones, or all that it lacks."""
    return tuple(
        tuple(
            Send(rank, (rank - far) % ranks, tuple((rank + i) % ranks for i in range(min(far, ranks - far))))
            for rank in range(ranks)
        )
        for far in [1 << level for level in range(levels(ranks))]
    )


def bruck_all_to_all(ranks: int) -> tuple[Step, ...]:
    """A chunk travels the distance to its destination by powers of two: distance 5 as 1 and 4."""
    steps = []
    for far in [1 << level for level in range(levels(ranks))]:
        sends = []
        for rank in range(ranks):
            first = [((rank - way % far) % ranks, way) for way in range(ranks) if way & far]
            chunks = tuple(source * ranks + (source + way) % ranks for source, way in first)
            sends.append(Send(rank, (rank + far) % ranks, chunks))
        steps.append(tuple(sends))
    return tuple(steps)


def chain_reduce(ranks: int) -> tuple[Step, ...]:
    """A broadcast backwards: sums of chunks come to rank 0 one after the other."""
    return transposed(chain_broadcast(ranks), adds=True)


def chain_scatter(ranks: int) -> tuple[Step, ...]:
    """A gather backwards: the chunk of the last rank leaves first."""
    return transposed(chain_gather(ranks), adds=False)


def ring_all_reduce(ranks: int) -> tuple[Step, ...]:
    """A reduce-scatter, then an all-gather."""
    return ring_reduce_scatter(ranks) + ring_all_gather(ranks)


def binomial_reduce(ranks: int) -> tuple[Step, ...]:
    """A broadcast backwards."""
    return transposed(binomial_broadcast(ranks), adds=True)


def binomial_all_reduce(ranks: int) -> tuple[Step, ...]:
    """A reduce, then a broadcast."""
    return binomial_reduce(ranks) + binomial_broadcast(ranks)


def binomial_scatter(ranks: int) -> tuple[Step, ...]:
    """A gather backwards."""
    return transposed(binomial_gather(ranks), adds=False)


def bruck_reduce_scatter(ranks: int) -> tuple[Step, ...]:
    """An all-gather backwards."""
    return transposed(bruck_all_gather(ranks), adds=True)
