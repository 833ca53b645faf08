"""A collective as text: a line per step with what every rank holds behind it, and who sends what.

    all-reduce, ring: 2 (p-1) (α + n/p β) (Patarasuk 2009)
              rank 0  rank 1  rank 2
      start   ○○○     ○○○     ○○○
      step 1  ○◐○     ○○◐     ◐○○     0→1 +2  1→2 +0  2→0 +1
      step 2  ●◐○     ○●◐     ◐○●     0→1 +1  1→2 +2  2→0 +0
      step 3  ●◐●     ●●◐     ◐●●     0→1 0  1→2 1  2→0 2
      step 4  ●●●     ●●●     ●●●     0→1 2  1→2 0  2→0 1

`LEGEND` explains the symbols.
"""

from pipeloom.common.quantities import table_lines
from pipeloom.plan.collectives.algorithms import Algorithm
from pipeloom.plan.collectives.sends import SUMMED, Send, held_before, held_behind, replay

LEGEND = (
    "one symbol per chunk: ● there (sums: complete), ◐ sum of some ranks, ○ a rank's own, · not there; 0→1 +2: adds"
)


def picture(algorithm: Algorithm, ranks: int) -> list[str]:
    """Lines with the start and every step of an algorithm.

    Args:
        algorithm: what is drawn.
        ranks: their number; more than 10 make wide lines.
    """
    collective, chunks = algorithm.collective, algorithm.chunks(ranks)
    steps = algorithm.steps(ranks)
    shown = held_behind(collective, ranks, chunks) if collective == "all-to-all" else [range(chunks)] * ranks
    start = [dict.fromkeys(mine, 1) for mine in held_before(collective, ranks, chunks)]
    complete = ranks if collective in SUMMED else 1
    rows = [["", *(f"rank {rank}" for rank in range(ranks)), ""]]
    for number, held in enumerate(replay(steps, start)):
        cells = [
            "".join(_symbol(mine.get(chunk), complete) for chunk in which)
            for mine, which in zip(held, shown, strict=True)
        ]
        sends = "  ".join(_words(send, algorithm, ranks) for send in sorted(steps[number - 1])) if number else ""
        rows.append([f"step {number}" if number else "start", *cells, sends])
    head = f"{collective}, {algorithm.name}: {algorithm.formula} ({algorithm.source})"
    return [head, *(f"  {line}".rstrip() for line in table_lines(rows))]


def _symbol(summands: int | None, complete: int) -> str:
    if summands is None:
        return "·"
    return "●" if summands == complete else "○" if summands == 1 else "◐"


def _words(send: Send, algorithm: Algorithm, ranks: int) -> str:
    """``0→1 +2``; of an all-to-all, a chunk is ``source/destination``."""
    names = [
        f"{chunk // ranks}/{chunk % ranks}" if algorithm.collective == "all-to-all" else f"{chunk}"
        for chunk in send.chunks
    ]
    several = algorithm.chunks(ranks) > 1
    what = (" " + ("+" if send.adds else "") + ",".join(names)) if several else " +" if send.adds else ""
    return f"{send.source}→{send.target}{what}"
