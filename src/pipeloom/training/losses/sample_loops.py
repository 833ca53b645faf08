"""`sample_of`: of which sample a term of a loss is; `adds_up`: whether a loop over samples adds up their losses."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pipeloom.training.losses.reductions import kind_of

_MOST_NODES = 64  # of the graph between a term and its sample
_TOLERANCE = 1e-5  # between numbers, relative


class LoopTerm(NamedTuple):
    """A term of a loss over the elements of one sample.

    Attributes:
        sample: its number in the micro-batch.
        num_elements: of the sample.
        numbers: by which they are divided, from the loss to the elements.
        has_mean: whether the last of these is the number of a mean over them.
    """

    sample: int
    num_elements: float
    numbers: Sequence[float]
    has_mean: bool


def sample_of(node: Any, num_samples: int) -> int | None:
    """The sample from whose elements a term is made; None: from those of several, or it is not seen.

    Args:
        node: of the graph, where the elements are reduced.
        num_samples: of the micro-batch.
    """
    found = set[int]()
    todo: list[tuple[Any, int]] = [(each, place) for each, place in node.next_functions if each is not None]
    visited = set(todo)
    while todo and len(visited) < _MOST_NODES:
        each, place = todo.pop(0)
        sample = _taken(each, place, num_samples)
        if sample is not None:
            found.add(sample)
            continue
        new = [pair for pair in each.next_functions if pair[0] is not None and pair not in visited]
        visited.update(new)
        todo += new
    return found.pop() if len(found) == 1 else None


def _taken(node: Any, place: int, num_samples: int) -> int | None:
    """The sample that an indexing or splitting along dimension 0 has taken as its result `place`."""
    kind = kind_of(node)
    if kind not in ("Select", "Slice", "Unbind", "Split", "SplitWithSizes") or node._saved_dim != 0:
        return None
    if kind in ("Unbind", "Split", "SplitWithSizes"):
        return place if len(node._input_metadata) == num_samples else None
    if node._saved_self_sym_sizes[0] != num_samples:
        return None
    if kind == "Select":
        index: int = node._saved_index
        return index if index < num_samples else index - 2**64 + num_samples
    start, end = (each if each < 2**63 else each - 2**64 + num_samples for each in (node._saved_start, node._saved_end))
    return start if min(end, num_samples) - start == 1 else None


def adds_up(terms: Sequence[LoopTerm], num_samples: int) -> bool | None:
    """Whether a loop over all samples adds up their losses, rather than take the mean; None: it is not known."""
    found = {_adds_up(term, num_samples) for term in terms}
    if {term.sample for term in terms} != {*range(num_samples)} or len(found) != 1:
        return None
    return found.pop()


def _adds_up(term: LoopTerm, num_samples: int) -> bool | None:
    outer = term.numbers[: -1 if term.has_mean else None]
    if num_samples == 1:  # a number of samples divides, or nothing shows a loop
        return False if 1.0 in outer else None
    number, inner = math.prod(outer), {1.0} if term.has_mean else {1.0, term.num_elements}
    found = {
        adds for adds, by in ((True, 1.0), (False, num_samples)) if any(_equal(number, by * each) for each in inner)
    }
    if found or term.has_mean:
        return found.pop() if len(found) == 1 else None
    if len(outer) > 1:  # the last is a number of other elements, such as those of a mask
        return _adds_up(term._replace(has_mean=True), num_samples)
    return None if _equal(number / num_samples, round(number / num_samples)) else True


def _equal(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=_TOLERANCE)
