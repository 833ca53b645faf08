"""`Rule`: what the loss of a micro-batch is, and how the calls of which it is made, and the labels, show that."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.training.losses.element_means import Loop, Means
from pipeloom.training.losses.reductions import Reduction

_IGNORED = -100


class Rule(StrEnum):
    """What the loss of a micro-batch is."""

    LABELS = "labels"
    SHIFTED = "shifted"
    SAMPLES = "samples"
    SUM = "sum"


class Given(NamedTuple):
    """The labels of a micro-batch.

    Attributes:
        labels: None: the batch has no tensor that says how many there are.
        is_even: whether all micro-batches, of all replicas, have as many that count per sample.
        may_add: whether a sum can be weighted as one.
        num_samples: of the micro-batch; 0: not known.
        counts: of labels that count, as they are and without the first of each sample; set by `LossRule.learn`.
    """

    labels: Tensor | None
    is_even: bool = True
    may_add: bool = True
    num_samples: int = 0
    counts: tuple[int, int] = (0, 0)


def rule_of(term: Reduction, given: Given) -> Rule | None:
    """The rule of one call; None: none of them."""
    if term.is_sum:
        return Rule.SUM
    if term.is_weighted:
        return None
    if term.classes() is None:
        return Rule.LABELS if given.labels is not None and given.labels.is_floating_point() else Rule.SAMPLES
    return counting(term, given)


def rule_of_loop(loop: Loop) -> Rule | None:
    """The rule of a loop over samples; None: it is not known."""
    return None if loop.adds is None else Rule.SUM if loop.adds else Rule.SAMPLES


def by_number(means: Means, given: Given) -> Rule | None:
    """The rule of a mean or a sum, by the number that divides it; None: it may be several, or another one."""
    if means.added:
        return Rule.SUM
    if len(means.terms) != 1 or given.labels is None or not means.terms[0].divides:
        return None
    number = means.terms[0].number
    numbers = (*zip((Rule.LABELS, Rule.SHIFTED), given.counts, strict=True), (Rule.SAMPLES, len(given.labels)))
    found = {
        rule for rule, each in (*numbers, (Rule.SAMPLES, given.labels.numel())) if abs(number - each) < 1e-3 * each
    }
    return next(iter(found)) if len(found) == 1 else None


def _num_classes(term: Reduction) -> int | None:
    """How many of the classes count; None: the call has none."""
    classes = term.classes()
    return None if classes is None else int(classes.ne(_IGNORED if term.ignored is None else term.ignored).sum())


def counting(term: Reduction, given: Given) -> Rule | None:
    """Over what a call with classes adds up."""
    classes, count = term.classes(), _num_classes(term)
    assert classes is not None
    found = [rule for rule, own in zip((Rule.LABELS, Rule.SHIFTED), given.counts, strict=True) if own == count]
    if given.labels is None or not found:
        has_labels = given.labels is not None and not given.labels.is_floating_point()
        samples = len(given.labels) if has_labels and given.labels is not None else 1
        return Rule.SAMPLES if count == classes.numel() and count % samples == 0 else None
    return found[0] if len(found) == 1 else _by_order(classes, given.labels)


def _by_order(classes: Tensor, labels: Tensor) -> Rule | None:
    """The rule where the first label of no sample counts, so that both count as many; None: the order is another."""
    classes, labels = classes.flatten(), labels.to(classes.device, classes.dtype)
    if torch.equal(classes, labels.flatten()):
        return Rule.LABELS
    ends = nn.functional.pad(labels, (0, 1), value=_IGNORED)[..., 1:]
    shifted = any(torch.equal(classes, each.flatten()) for each in (labels[..., 1:], ends))
    return Rule.SHIFTED if shifted else None


def shows_nothing(terms: Sequence[Reduction], given: Given) -> bool:
    """Whether a micro-batch cannot tell rules apart: no label counts, or as many with the first of each and without."""
    if given.labels is not None and not any(given.counts):
        return True
    for term in terms:
        count, classes = _num_classes(term), term.classes()
        if count == 0:
            return True
        if given.labels is None or classes is None or {*given.counts} != {count}:
            continue
        if _by_order(classes, given.labels) is None:
            return True
    return False


def may_change(term: Reduction, rule: Rule | None, given: Given) -> bool:
    """Whether the classes that count may be others in another batch, because the loss chooses them."""
    if term.classes() is None:
        return False
    return rule is Rule.SAMPLES if given.labels is not None else (term.ignored or -1) >= 0


def is_another_mean(term: Reduction, rule: Rule | None) -> bool:
    """Whether a mean is taken over something that even numbers of labels do not make even."""
    return rule is None and (term.is_weighted or term.classes() is not None)


def numbers_text(term: Reduction) -> str:
    """Over what a call took its mean or sum, in words."""
    kind = "sum" if term.is_sum else "weighted mean" if term.is_weighted else "mean"
    classes = term.classes()
    return f"({kind})" if classes is None else f"({kind} over {_num_classes(term)} of {classes.numel()} labels)"


def no_labels_count(ignored: object) -> str:
    """The text about a batch in which no label counts: all are `ignored`."""
    return f"no label of the batch counts, all are {ignored}: the loss is 0 and trains nothing. Check the labels."
