"""Walk the columns of a schedule, round by round.

round 1   0F0                 every rank that can advances by one action,
round 2   0F1 1F0             all of them at once: few steps for many ranks;
round 3   0F2 1F1 2F0         a schedule that keeps few ranks busy is walked action by action instead
"""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]

_NARROW = 16  # ranks that advance in a round; with fewer, single steps are faster
_TRIAL = 256  # rounds between checks of the width


def walk_columns(first: Ints, remote: Ints, partner: Ints | None) -> tuple[Ints, tuple[int, ...] | None] | None:
    """An order that respects all dependencies, and where its rounds begin and end.

    Args:
        first: for each rank, the index of its first action; one more entry ends the last rank.
        remote: for each action, the index of the one on another rank that it waits for; their number for none.
        partner: a second one of these; None where there are no overlapped units.

    Returns:
        All indices in order, and the bounds of the rounds in it (None: walked action by action); None if actions wait
        for each other in a circle.
    """
    count = len(remote)
    done = np.zeros(count + 1, bool)
    done[count] = True  # stands for "no need"
    padded = np.append(remote, np.int32(count))  # a rank at its end may look one further
    padded_partner = None if partner is None else np.append(partner, np.int32(count))
    heads, ends = first[:-1].copy(), first[1:]
    sequence = np.empty(count, np.int32)
    rounds = [0]
    size = 0
    while size < count:
        ready = done[padded[heads]]
        ready &= heads < ends
        if padded_partner is not None:
            ready &= done[padded_partner[heads]]
        run = heads[ready]
        if not len(run):
            return None
        done[run] = True
        sequence[size : size + len(run)] = run
        size += len(run)
        rounds.append(size)
        heads += ready
        if len(rounds) % _TRIAL == 0 and size < _NARROW * len(rounds):
            single = _walk_singly(first, remote, partner)
            return None if single is None else (single, None)
    return sequence, tuple(rounds)


def _walk_singly(first: Ints, remote: Ints, partner: Ints | None) -> Ints | None:
    """`Proof.sequence`: each rank advances as far as it can, before the next one's turn."""
    count = len(remote)
    first_need = remote.tolist()
    second_need = None if partner is None else partner.tolist()
    done = bytearray(count) + b"\1"
    heads, ends = first[:-1].tolist(), first[1:].tolist()
    waiting: dict[int, list[int]] = {}
    sequence: list[int] = []
    ready = list(range(len(heads)))
    while ready:
        rank = ready.pop()
        index, end = heads[rank], ends[rank]
        while index < end:
            need = first_need[index]
            if done[need] and second_need is not None:
                need = second_need[index]
            if not done[need]:
                waiting.setdefault(need, []).append(rank)
                break
            done[index] = 1
            sequence.append(index)
            if index in waiting:
                ready.extend(waiting.pop(index))
            index += 1
        heads[rank] = index
    return np.array(sequence, np.int32) if len(sequence) == count else None
