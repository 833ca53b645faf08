"""`Recompute`: what of a stage's forward is kept for its backward, and what the backward computes again."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pipeloom.errors import InputError


class Recompute(StrEnum):
    """How much of a stage its backward computes again (arXiv:2205.05198, section 5)."""

    NONE = "none"  # everything that autograd saves is kept
    SELECTIVE = "selective"  # attention: scores, softmax and what else stands between queries and the result
    FULL = "full"  # every block: its input is all that is kept


def recompute_of_stages(given: str | Sequence[str], num_stages: int) -> tuple[Recompute, ...]:
    """What was asked for, one a stage.

    Args:
        given: "none", "selective" or "full", for all stages or one a stage, as a list or with commas between them.
        num_stages: how many stages there are.

    Raises:
        InputError: another word, or another number of them.
    """
    words = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    known = [str(kind) for kind in Recompute]
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word in known for word in words):
        raise InputError(f"recompute is {given!r}: it is {', '.join(known)}, or one of these a stage; choose one")
    if len(words) == 1 and isinstance(given, str):
        words = [*words] * num_stages
    if len(words) != num_stages:
        raise InputError(
            f"recompute names {len(words)} stages of {num_stages}: one word is for all, several are one a stage; "
            f"give {num_stages}"
        )
    return tuple(map(Recompute, words))
