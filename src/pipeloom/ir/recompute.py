"""`Recompute`: activation recomputation (checkpointing) of a stage."""

from collections.abc import Sequence
from enum import StrEnum

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError


class Recompute(StrEnum):
    """Which activations of a stage its backward recomputes (arXiv:2205.05198, section 5)."""

    NONE = "none"  # all saved tensors of autograd are kept
    SELECTIVE = "selective"  # attention is recomputed: scores, softmax, all between queries and the result
    FULL = "full"  # every block is recomputed; only its input is kept


def recompute_of_stages(given: str | Sequence[str], num_stages: int) -> tuple[Recompute, ...]:
    """The recomputation of each stage.

    Args:
        given: "none", "selective" or "full" for all stages, or one value per stage as a list or separated by commas.
        num_stages: the number of stages.

    Raises:
        InputError: an unknown value, or the wrong number of values.
    """
    words = [part.strip() for part in given.split(",")] if isinstance(given, str) else given
    known = [str(kind) for kind in Recompute]
    if not isinstance(words, Sequence) or not all(isinstance(word, str) and word in known for word in words):
        raise InputError(f"recompute={given!r}: must be {', '.join(known)}, or one of these per stage.")
    if len(words) == 1 and isinstance(given, str):
        words = [*words] * num_stages
    if len(words) != num_stages:
        if len(words) == 1:
            raise InputError(
                f"recompute={given!r}: a list needs one value per stage, and there are {num_stages}. Pass the string "
                f"{words[0]!r} for all stages, or a list of {num_stages} values."
            )
        raise InputError(
            f"recompute={given!r}: has {counted(len(words), 'value')} for {counted(num_stages, 'stage')}. "
            f"Use one value for all stages, or {num_stages} values."
        )
    return tuple(map(Recompute, words))
