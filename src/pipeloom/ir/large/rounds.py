"""Walk the columns of a schedule, round by round.

round 1   0F0                 every rank that can advances by one action,
round 2   0F1 1F0             all of them at once: few steps for many ranks;
round 3   0F2 1F1 2F0         a schedule that keeps few ranks busy is walked action by action instead

Most schedules repeat themselves, so many rounds are guessed at once, from the last ones, and checked at once: who can
advance in a round depends on earlier rounds alone, so the rounds before the first wrong guess are right.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_NARROW = 16  # actions per round walked one by one; with fewer, single steps are faster
_TRIAL = 256  # rounds walked one by one before their width counts
_STEPS = 32  # rounds walked one by one before the next guess
_GUESSES = 128, 2048  # rounds of a guess: fewest, most
_NEVER = np.iinfo(np.int32).max


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
    walk, guessed = _Walk(first, remote, partner), _GUESSES[0]
    while walk.size < len(remote):
        if not walk.step(_STEPS):
            return None
        right = walk.guess(guessed)
        guessed = min(2 * guessed, _GUESSES[1]) if right == guessed else _GUESSES[0]
        if walk.stepped >= _TRIAL and walk.size < min(len(remote), _NARROW * walk.stepped):
            single = _walk_singly(first, remote, partner)
            return None if single is None else (single, None)
    return walk.result()


class _Walk:
    """Actions have places here: behind the last action of each rank is a place for none, which waits for ever.

    Attributes:
        size, num_rounds: actions and rounds walked.
        stepped: rounds walked one by one.
    """

    def __init__(self, first: Ints, remote: Ints, partner: Ints | None) -> None:
        self.size = self.num_rounds = self.stepped = 0
        count, num_ranks = len(remote), len(first) - 1
        ranks = np.arange(num_ranks, dtype=np.int32)
        place = np.arange(count, dtype=np.int32) + np.repeat(ranks, np.diff(first))
        self._num_places = count + num_ranks
        always, never = self._num_places, self._num_places + 1
        self._place, self._ends = place, first[1:] + ranks
        self._round = np.full(self._num_places + 2, _NEVER, np.int32)  # in which the action of a place runs
        self._round[always] = -1
        places = np.append(place, np.int32(always))
        self._needs = []
        for needed in (remote,) if partner is None else (remote, partner):
            need = np.full(self._num_places, never, np.int32)
            need[place] = places[needed]
            self._needs.append(need)
        self._heads: Ints = first[:-1] + ranks
        self._advanced: Bools = np.zeros((0, num_ranks), bool)  # in the last rounds
        self._walked: list[Ints] = []  # places
        self._widths: list[npt.NDArray[Any]] = []  # of rounds

    def step(self, num_rounds: int) -> bool:
        """Walk rounds one by one; whether any rank advanced."""
        rounds, heads = self._round, self._heads
        rows = np.empty((num_rounds, len(heads)), np.int32)
        advanced = np.empty((num_rounds, len(heads)), bool)
        for number, (row, ready) in enumerate(zip(rows, advanced, strict=True), self.num_rounds):
            np.less(rounds.take(self._needs[0].take(heads)), number, out=ready)
            for need in self._needs[1:]:
                ready &= rounds.take(need.take(heads)) < number
            row[:] = heads
            rounds[heads[ready]] = number
            heads = heads + ready
        self._keep(rows, advanced, heads)
        self.stepped += num_rounds
        return bool(advanced[0].any())

    def guess(self, num_rounds: int) -> int:
        """Walk rounds that repeat the last ones, up to the first one in which other ranks can advance; their number."""
        if (lag := self._lag()) is None:
            return 0
        # A row for each rank, whose places lie side by side in memory.
        advanced = np.tile(self._advanced[-lag:].T, -(-num_rounds // lag))[:, :num_rounds]
        places = np.empty(advanced.shape, np.int32)
        places[:, 0] = self._heads
        np.cumsum(advanced[:, :-1], axis=1, dtype=np.int32, out=places[:, 1:])
        places[:, 1:] += self._heads[:, None]
        np.minimum(places, self._ends[:, None], out=places)
        numbers = np.arange(self.num_rounds, self.num_rounds + num_rounds, dtype=np.int32)
        self._round[_chosen(places, advanced)] = _chosen(np.broadcast_to(numbers, places.shape), advanced)
        ready = self._round.take(self._needs[0].take(places)) < numbers
        for need in self._needs[1:]:
            ready &= self._round.take(need.take(places)) < numbers
        wrong = np.flatnonzero((ready != advanced).any(0))
        right = int(wrong[0]) if len(wrong) else num_rounds
        self._round[places[:, right:]] = _NEVER
        self._round[self._ends] = _NEVER
        if right:
            last = places[:, right - 1] + advanced[:, right - 1]
            self._keep(places[:, :right].T, advanced[:, :right].T, last)
        return right

    def result(self) -> tuple[Ints, tuple[int, ...]]:
        """All indices, and the bounds of the rounds."""
        index = np.empty(self._num_places, np.int32)
        index[self._place] = np.arange(len(self._place), dtype=np.int32)
        bounds = np.cumsum(np.concatenate([[0], *self._widths]))
        whole = int(np.searchsorted(bounds, self.size)) + 1
        return index[np.concatenate(self._walked)], tuple(bounds[:whole].tolist())

    def _keep(self, rows: Ints, advanced: Bools, heads: Ints) -> None:
        run = _chosen(rows, advanced)
        self._walked.append(run)
        self._widths.append(np.count_nonzero(advanced, axis=1))
        self.size += len(run)
        self.num_rounds += len(rows)
        self._heads, self._advanced = heads, np.concatenate([self._advanced, advanced])[-4 * _STEPS :]

    def _lag(self) -> int | None:
        """The smallest number of rounds after which the last ones repeat themselves."""
        rows = [row.tobytes() for row in self._advanced]
        for lag in range(1, len(rows) // 2 + 1):
            if rows[-lag:] == rows[-2 * lag : -lag]:
                return lag
        return None


def _chosen(rows: Ints, advanced: Bools) -> Ints:
    return rows.reshape(-1) if advanced.all() else rows[advanced]


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
