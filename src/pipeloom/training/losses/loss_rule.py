"""`LossRule`: how the loss that a model computes itself combines over micro-batches.

The loss of a batch is a sum over its micro-batches, each with a weight:

    Rule.LABELS    the mean over labels         the micro-batch's part of the labels that count
    Rule.SHIFTED   without the first of each    the same of those labels
    Rule.SAMPLES   the mean over samples        its part of the samples
    Rule.SUM       a sum                        1

The first forward shows which it is, by the losses of torch.nn.functional that it calls.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from threading import local
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from pipeloom.training.losses.reductions import SCALED_SUM, Reduction, Reductions

_IGNORED = -100
_NUM_ASKED = 2  # batches in which the host may wait for the device to learn the rule
_MOST_ASKED = 100  # batches that are watched, as long as nothing is known


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
        counts: of labels that count, as they are and without the first of each sample; set by `LossRule.learn`.
    """

    labels: Tensor | None
    is_even: bool = True
    may_add: bool = True
    counts: tuple[int, int] = (0, 0)


class LossRule:
    """Learns the rule of a model's own loss.

    Args:
        model: the model. Its configuration, its loss or a part of it may name a label that does not count.

    Attributes:
        rule: None: not known yet.
        ignored: the label from 0 on that does not count; None: all of them count. Negative labels never do.
        asks: whether forwards are watched.
    """

    def __init__(self, model: Any) -> None:
        self.rule: Rule | None = None
        self.ignored = ignored_label(model)
        self._model = type(model).__name__
        self.asks, self._num_batches = True, 0
        self._thread, self._to_tell, self._told = local(), "", set[str]()

    def __deepcopy__(self, _: Any) -> Self:
        return self  # copies of a stage learn together

    # A forward

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the forward of a micro-batch with its loss runs, before `learn` in the same thread."""
        self._thread.seen = None
        if not self.asks:
            yield
            return
        seen = self._thread.seen = Reductions()
        with seen:
            yield

    @torch.no_grad()
    def learn(
        self, loss: Tensor, given: Given, *, divided: bool = False, by_value: Callable[[], Rule | None] = lambda: None
    ) -> None:
        """Learn from the loss of the forward that was watched.

        Args:
            divided: whether the model has divided it by the number of labels that it was given.
            by_value: the rule of a loss that other functions made, if its value shows it.
        """
        seen: Reductions | None = getattr(self._thread, "seen", None)
        self._thread.seen = None
        if seen is None or not self.asks:
            return
        terms, others = seen.terms(loss)
        if not terms and loss.grad_fn is None:  # an evaluation, which does not show of what the loss is made
            return
        if given.labels is None and loss.is_cuda:  # nothing weighs such batches
            self.begin_batch(on_gpu=True)
        self._check_ignored(terms, given)
        if given.labels is not None:
            given = given._replace(counts=self.counts_of(given.labels))
        if _shows_nothing(terms, given):
            return
        if divided:
            rules = {_counting(each, given) for each in terms if each.classes() is not None}
            self._know(rules & {Rule.LABELS, Rule.SHIFTED})
            self.asks = self.rule is None
            return
        rules_of = [_rule_of(each, given) for each in terms]
        by_terms = bool(terms) and others != SCALED_SUM
        found = self._know(set(rules_of) if by_terms else {_by_factor(terms, loss, given) or by_value()})
        agrees = found is not None and found is self.rule and (given.may_add or found is not Rule.SUM)
        if agrees and not (by_terms and others):
            self.asks = any(map(partial(_may_change, given=given), terms, rules_of))
        elif given.labels is None and not terms:
            self.asks = False  # the mean over samples, as documented
        elif (
            not given.is_even
            or given.labels is None
            or others == SCALED_SUM
            or (found is not None and not agrees)
            or any(map(_is_another_mean, terms, rules_of))
        ):
            self._tell("rule", self._unknown(terms, others, given))
            self.asks = False

    def begin_batch(self, *, on_gpu: bool) -> None:
        """Another batch begins. Forwards are not watched for ever, on a GPU only in the first batches."""
        self._num_batches += 1
        if self._num_batches > (_NUM_ASKED if on_gpu else _MOST_ASKED):
            self.asks = False

    def _know(self, found: Set[Rule | None]) -> Rule | None:
        """Keep the only rule that was found, if none was before; returns what was found."""
        rule = next(iter(found)) if len(found) == 1 else None
        self.rule = self.rule or rule
        return rule

    def _check_ignored(self, terms: Sequence[Reduction], given: Given) -> None:
        """Take the label that does not count from the losses."""
        named = {each.ignored for each in terms if each.classes() is not None}
        if given.labels is None or len(named) != 1:
            return
        before, found = self.ignored, next(iter(named))
        self.ignored = None if found is None or found < 0 else found
        other = before if self.ignored is None else self.ignored
        if before != self.ignored and bool(torch.eq(given.labels, -1 if other is None else other).any()):
            self._tell(
                "ignored",
                f"{self._model} computes its own loss, in which label {other} "
                f"{'counts' if self.ignored is None else 'does not count'}: the pipeline found out in this step, and "
                "may have weighted its micro-batches wrongly. Later steps are right. For the first step, name the "
                "label that does not count in the model's config, as ignore_index.",
            )

    def _unknown(self, terms: Sequence[Reduction], others: str | None, given: Given) -> str:
        seen = [f"a {each.name} {_numbers(each)}" for each in terms] + ([others] if others else [])
        by = "samples" if given.labels is None or self.rule is Rule.SAMPLES else "labels that count"
        weighted = "added up" if self.rule is Rule.SUM and given.may_add else f"weighted by their {by}"
        return (
            f"{self._model} computes its own loss from {' and '.join(dict.fromkeys(seen)) or 'other functions'}: the "
            f"pipeline cannot tell how losses of micro-batches combine. They are {weighted}; the loss of the whole "
            "batch may be another. Pass loss_fn to Pipeline, such as pipeloom.mean_over_labels(...)."
        )

    # Warnings

    def _tell(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            self._to_tell = f"{self._to_tell} {text}".strip()

    def told(self) -> str | None:
        """A text about a loss that may be wrong, once."""
        text, self._to_tell = self._to_tell, ""
        return text or None

    # Labels

    def counted(self, labels: Tensor) -> Tensor:
        """Which labels count."""
        if labels.is_floating_point():
            return torch.ones_like(labels, dtype=torch.bool)
        return labels >= 0 if self.ignored is None else (labels >= 0) & (labels != self.ignored)

    def counts_of(self, labels: Tensor) -> tuple[int, int]:
        """How many count, as they are and without the first of each sample."""
        counted = self.counted(labels)
        return int(counted.sum()), int((counted[..., 1:] if counted.dim() > 1 else counted).sum())


def ignored_label(model: Any) -> int | None:
    """The label from 0 on that a model names as one that does not count; None: it names none.

    Its configuration has it as "ignore_index", or a longer name that ends so; a loss function as the default of its
    argument; a loss that is a part of the model as an attribute.
    """
    config = getattr(model, "config", None)
    named = [value for name, value in getattr(config, "__dict__", {}).items() if name.endswith("ignore_index")]
    function = getattr(model, "loss_function", None)
    if inspect.isroutine(function):
        given = inspect.signature(function).parameters.get("ignore_index")
        named += [] if given is None else [given.default]
    if isinstance(model, nn.Module):
        named += [part.ignore_index for part in model.modules() if hasattr(part, "ignore_index")]
    return next((each for each in named if isinstance(each, int) and not isinstance(each, bool) and each >= 0), None)


def _rule_of(term: Reduction, given: Given) -> Rule | None:
    """The rule of one call; None: none of them."""
    if term.is_sum:
        return Rule.SUM
    if term.is_weighted:
        return None
    if term.classes() is None:
        return Rule.LABELS if given.labels is not None and given.labels.is_floating_point() else Rule.SAMPLES
    return _counting(term, given)


def _by_factor(terms: Sequence[Reduction], loss: Tensor, given: Given) -> Rule | None:
    """The rule of a sum that is divided by a number, by that number; None: it may be several, or another one."""
    if len(terms) != 1 or given.labels is None or not loss:
        return None
    number = float(terms[0].result) / float(loss)
    numbers = (*zip((Rule.LABELS, Rule.SHIFTED), given.counts, strict=True), (Rule.SAMPLES, len(given.labels)))
    found = {
        rule for rule, each in (*numbers, (Rule.SAMPLES, given.labels.numel())) if abs(number - each) < 1e-3 * each
    }
    return next(iter(found)) if len(found) == 1 else None


def _num_classes(term: Reduction) -> int | None:
    """How many of the classes count; None: the call has none."""
    classes = term.classes()
    return None if classes is None else int(classes.ne(_IGNORED if term.ignored is None else term.ignored).sum())


def _counting(term: Reduction, given: Given) -> Rule | None:
    """Over what a call with classes adds up."""
    classes, count = term.classes(), _num_classes(term)
    assert classes is not None
    found = [rule for rule, own in zip((Rule.LABELS, Rule.SHIFTED), given.counts, strict=True) if own == count]
    if given.labels is None or not found:
        samples = 1 if given.labels is None else len(given.labels)
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


def _shows_nothing(terms: Sequence[Reduction], given: Given) -> bool:
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


def _may_change(term: Reduction, rule: Rule | None, given: Given) -> bool:
    """Whether the classes that count may be others in another batch, because the loss chooses them."""
    if term.classes() is None:
        return False
    return rule is Rule.SAMPLES if given.labels is not None else (term.ignored or -1) >= 0


def _is_another_mean(term: Reduction, rule: Rule | None) -> bool:
    """Whether a mean is taken over something that even numbers of labels do not make even."""
    return rule is None and (term.is_weighted or term.classes() is not None)


def _numbers(term: Reduction) -> str:
    """Over what a call took its mean or sum, in words."""
    kind = "sum" if term.is_sum else "weighted mean" if term.is_weighted else "mean"
    classes = term.classes()
    return f"({kind})" if classes is None else f"({kind} over {_num_classes(term)} of {classes.numel()} labels)"
