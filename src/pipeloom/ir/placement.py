"""`Placement`: which ranks hold which stage."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from pipeloom.errors import ScheduleError, folded, listed
from pipeloom.ir.check.input_types import whole_number
from pipeloom.ir.order import MOST_STAGES


@dataclass(frozen=True, slots=False)
class Placement:
    """For each stage, the rank or the replica ranks that hold it.

    Micro-batch ``b`` of stage ``s`` runs on ``replicas[s][b % len(replicas[s])]``. This rule covers

    * loops (``Placement.loop``): one rank per stage, round-robin over the ranks;
    * V shapes (``Placement.v``): the second chunk runs back up, so the last stage shares a rank with the first;
    * bidirectional pipelines (``Placement.bidirectional``): every stage twice, even micro-batches go down, odd ones up;
    * PipeDream's 1F1B-RR (``Placement.replicated``): slow stages on several ranks.
    """

    replicas: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.replicas, Iterable) or not all(isinstance(ranks, Iterable) for ranks in self.replicas):
            raise ScheduleError(
                f"replicas={folded(self.replicas)}: a placement needs the ranks of each stage. Pass a tuple of tuples "
                "such as ((0,), (1,))."
            )
        made = tuple(tuple(whole_number(rank, "a rank of a placement") for rank in ranks) for ranks in self.replicas)
        object.__setattr__(self, "replicas", made)
        if not made or not all(made):
            raise ScheduleError(f"replicas={folded(made)}: every stage needs at least one rank.")
        seen = sorted({rank for ranks in made for rank in ranks})
        if seen != list(range(len(seen))):
            raise ScheduleError(
                f"placement uses ranks {listed(seen)}: ranks must be numbered from 0 without gaps. Renumber the ranks."
            )
        for stage, ranks in enumerate(self.replicas):
            if len(set(ranks)) != len(ranks):
                raise ScheduleError(
                    f"replicas[{stage}]={ranks}: replicas of a stage need different ranks. Remove the duplicate."
                )

    @classmethod
    def loop(cls, num_ranks: int, num_chunks: int = 1) -> Self:
        """Stage ``c * num_ranks + d`` on rank ``d`` (Megatron-LM, arXiv:2104.04473)."""
        _check_count(num_ranks, num_chunks)
        return cls(tuple((d,) for _ in range(num_chunks) for d in range(num_ranks)))

    @classmethod
    def v(cls, num_ranks: int, num_chunks: int = 2) -> Self:
        """Down the ranks, then up, then down: chunk ``c`` runs backwards where ``c`` is odd (arXiv:2405.15362)."""
        _check_count(num_ranks, num_chunks)
        down = list(range(num_ranks))
        order = [d for c in range(num_chunks) for d in (down if c % 2 == 0 else reversed(down))]
        return cls(tuple((d,) for d in order))

    @classmethod
    def bidirectional(cls, num_ranks: int) -> Self:
        """Stage ``s`` on ranks ``s`` and ``num_ranks - 1 - s`` (Chimera, DualPipe); ``num_ranks`` is even."""
        _check_count(num_ranks)
        if num_ranks % 2:
            raise ScheduleError(
                f"num_ranks={num_ranks}: a bidirectional placement needs an even number of ranks. Use "
                f"{even_near(num_ranks)}."
            )
        return cls(tuple((s, num_ranks - 1 - s) for s in range(num_ranks)))

    @classmethod
    def replicated(cls, replicas: Sequence[int]) -> Self:
        """Stage ``s`` on ``replicas[s]`` consecutive ranks (PipeDream 1F1B-RR, arXiv:1806.03377)."""
        if isinstance(replicas, str) or not isinstance(replicas, Iterable):
            raise ScheduleError(f"replicas={folded(replicas)}: must have one number of ranks per stage, as [2, 1, 1].")
        _check_count(sum(whole_number(count, "the ranks of a stage") for count in replicas))
        ranks, first = [], 0
        for count in replicas:
            ranks.append(tuple(range(first, first + count)))
            first += count
        return cls(tuple(ranks))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Searches look placements of many stages up again and again."""
        return hash(self.replicas)

    @property
    def num_stages(self) -> int:
        return len(self.replicas)

    @cached_property
    def num_ranks(self) -> int:
        return 1 + max(rank for ranks in self.replicas for rank in ranks)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, its stages in ascending order."""
        held: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, ranks in enumerate(self.replicas):
            for rank in ranks:
                held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether several ranks hold a stage."""
        return any(len(ranks) > 1 for ranks in self.replicas)

    @property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(len(stages) for stages in self.stages_of)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank on which `stage` runs `microbatch`, forward and backward."""
        ranks = self.replicas[stage]
        return ranks[microbatch % len(ranks)]


def even_near(odd: int) -> str:
    """The even numbers next to an odd number of ranks, for a message."""
    return "2" if odd < 3 else f"{odd - 1} or {odd + 1}"


def _check_count(num_ranks: int, num_chunks: int = 1) -> None:
    """Validate the number of stages before a placement takes memory."""
    stages = whole_number(num_ranks, "the number of ranks") * whole_number(num_chunks, "the number of chunks")
    if num_ranks < 1 or not 0 < stages <= MOST_STAGES:
        raise ScheduleError(
            f"num_ranks={num_ranks}, num_chunks={num_chunks}: both must be at least 1, and their product, the number "
            f"of stages, at most {MOST_STAGES:,}."
        )
