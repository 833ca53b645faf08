"""`LossRule`: how the loss that a model computes itself combines over micro-batches.

The loss of a batch is a sum over its micro-batches, each with a weight:

    Rule.LABELS    the mean over labels         the micro-batch's part of the labels that count
    Rule.SHIFTED   without the first of each    the same of those labels
    Rule.SAMPLES   the mean over samples        its part of the samples
    Rule.SUM       a sum                        1

The first forward shows which it is, by the losses of torch.nn.functional that it calls. Forwards of later micro-batches
show whether it is a mean over numbers of elements that differ otherwise than these weights: then it is a mean of means.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipeloom.training.losses.element_means import Means, UnequalMeans, means_of, replicas_text
from pipeloom.training.losses.reductions import SCALED_SUM, Reduction, Reductions
from pipeloom.training.losses.sample_halves import CannotAskError
from pipeloom.training.losses.stage_halves import StageHalves
from pipeloom.training.losses.term_rules import (
    Given,
    Rule,
    by_number,
    counting,
    is_another_mean,
    may_change,
    no_labels_count,
    numbers_text,
    rule_of,
    rule_of_loop,
    shows_nothing,
)

_NUM_ASKED = 2  # batches in which the host may wait for the device to learn the rule
_NEAR = 1e-3  # between two values of a loss, relative
_MOST_ASKED = 100  # batches that are watched, as long as nothing is known
_WEIGHTS = {Rule.LABELS: 0, Rule.SHIFTED: 1, Rule.SAMPLES: 2, Rule.SUM: 3}  # where weights stand


class LossRule:
    """Learns the rule of a model's own loss.

    Args:
        model: the model. Its configuration, its loss or a part of it may name a label that does not count.

    Attributes:
        rule: None: not known yet.
        ignored: the label from 0 on that does not count; None: all of them count. Negative labels never do.
        asks: whether forwards are watched.
        contrasts: whether the model is asked for a loss without labels, of which samples are compared with each other.
    """

    def __init__(self, model: Any) -> None:
        self.rule: Rule | None = None
        self.ignored = ignored_label(model)
        self._model = type(model).__name__
        self.asks, self.contrasts, self._num_batches = True, False, 0
        self._is_decided, self._unequal = False, UnequalMeans()
        self._halves: StageHalves | None = StageHalves()
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
        self._thread.seen = self._thread.to_halve = None
        if seen is None or not self.asks:
            return
        if self._num_batches > (_NUM_ASKED if loss.is_cuda else _MOST_ASKED):
            self.asks = False
            return
        terms, others = seen.terms(loss)
        if not terms and loss.grad_fn is None:  # an evaluation, which does not show of what the loss is made
            return
        if not self._is_decided:
            self._check_ignored(terms, given)
        if given.labels is not None:
            given = given._replace(counts=self.counts_of(given.labels))
        if shows_nothing(terms, given):
            return
        means = means_of(loss, seen, given.num_samples)
        if divided:
            rules = {counting(each, given) for each in terms if each.classes() is not None}
            self._know(rules & {Rule.LABELS, Rule.SHIFTED})
            self._is_decided = self.rule is not None
            self.asks = not self._is_decided
            return
        if not self._is_decided:
            self._decide(terms, others, means, given, by_value)
        self.asks = self._compare(means, given) or not self._is_decided
        by_sample = self.rule is Rule.SAMPLES or _has_label_per_sample(given)
        compares = others is not None or by_sample or not _is_sum_of(terms, loss)
        if compares and not self._told & {"rule", "contrasts"}:
            self._thread.to_halve = terms, others, given

    def _decide(
        self,
        terms: Sequence[Reduction],
        others: str | None,
        means: Means,
        given: Given,
        by_value: Callable[[], Rule | None],
    ) -> None:
        """Find the rule, or tell that it cannot be known, as far as this micro-batch shows it."""
        loop, all_terms = means.loop, terms
        if loop is not None:
            terms = [each for each in terms if id(each.result) not in loop.results]
            others = None if others == SCALED_SUM and not any(each.is_sum for each in terms) else others
        rules_of = [rule_of(each, given) for each in terms]
        rules = {*rules_of} if loop is None else {*rules_of, rule_of_loop(loop)}
        by_terms = loop is not None or (bool(terms) and others != SCALED_SUM)
        found = self._know(rules if by_terms else {by_number(means, given) or by_value()})
        agrees = found is not None and found is self.rule and (given.may_add or found is not Rule.SUM)
        if agrees and not means.is_nonlinear and not (by_terms and others):
            self._is_decided = not any(map(partial(may_change, given=given), terms, rules_of))
        elif given.labels is None and not terms and means.added is None and loop is None and not means.is_nonlinear:
            self._is_decided = True  # the mean over samples, as documented
        elif (
            not given.is_even
            or given.labels is None
            or others == SCALED_SUM
            or means.added is not None
            or means.is_nonlinear
            or (loop is not None and loop.adds is None)
            or (Rule.SUM in rules and len(rules) > 1)
            or (found is not None and not agrees)
            or any(map(is_another_mean, terms, rules_of))
        ):
            self._tell("rule", self._unknown(all_terms, others, given))
            self._is_decided = True

    def _compare(self, means: Means, given: Given) -> bool:
        """Tell about a mean of means; returns whether later micro-batches may show one."""
        by_labels = self.rule in (Rule.LABELS, Rule.SHIFTED)  # means over labels are then weighted rightly
        terms = tuple(each for each in means.terms if each.ignored is None or not by_labels)
        if "rule" in self._told or not any(each.divides for each in terms):
            return False
        by = _WEIGHTS[self.rule or Rule.SAMPLES] if given.may_add or self.rule is not Rule.SUM else 2
        weights = (*given.counts, given.num_samples, 1)
        text = self._unequal.compare(means._replace(terms=terms), given.num_samples, weights, by)
        if text is not None:
            self._tell_means(text, self._by(given))
        return text is None

    def compare_halves(self, stage: nn.Module, value: Any, output: Any) -> None:
        """Tell about a loss that combines otherwise than by the rule; after `learn`.

        Args:
            stage: the last one.
            value, output: what it got and returned.
        """
        terms, others, given = getattr(self._thread, "to_halve", None) or ((), None, None)
        self._thread.to_halve = None
        if given is None or self._halves is None:
            return
        try:
            found = self._halves.ask(stage, value, output, given.num_samples)
        except CannotAskError:
            self._halves = None
            return
        if found is None or (found.means_differ and self.asks):  # later micro-batches show which means differ
            return
        weights = self._weights_of_halves(found.middle, given)
        seen = ""
        if not found.combine_to(weights):
            seen = f"{others} ({found.text()})" if others else f"samples that depend on each other ({found.text()})"
        elif not found.gradients_combine_to(weights):
            seen = f"{others or 'samples'} whose gradients depend on other samples"
        if seen:
            self._tell("rule", self._unknown(terms, seen, given))
            self._halves = None

    def _weights_of_halves(self, middle: int, given: Given) -> tuple[float, float]:
        """How the losses of the first samples and of the others are weighted, as those of micro-batches are."""
        if self.rule is Rule.SUM and given.may_add:
            return 1.0, 1.0
        numbers = [middle, given.num_samples - middle]
        if self.rule is not Rule.SAMPLES and given.labels is not None:
            parts = given.labels[:middle], given.labels[middle:]
            numbers = [self.counts_of(each)[self.rule is Rule.SHIFTED] for each in parts]
        return numbers[0] / max(1, sum(numbers)), numbers[1] / max(1, sum(numbers))

    def elements(self) -> tuple[int, int]:
        """Over how many elements the loss of the last batch was a mean; see `LabelWeights`."""
        return self._unequal.elements() if self.asks else (0, 0)

    def compare_replicas(self, own: tuple[int, int], all_replicas: tuple[int, int]) -> None:
        """Tell about a mean over other numbers of elements than in other replicas."""
        by_labels = self.rule in (Rule.LABELS, Rule.SHIFTED)
        text = replicas_text(own, all_replicas, "label" if by_labels else "sample")
        if text is not None and "rule" not in self._told:
            self._tell_means(text, "labels that count" if by_labels else "samples")

    def _tell_means(self, text: str, by: str) -> None:
        self._tell(
            "rule",
            f"{self._model} computes its own loss from {text}: the pipeline trains the mean of their means, weighted "
            f"by their {by}. For the mean over all elements, pass their mask as targets and "
            "loss_fn=pipeloom.mean_over_labels(lambda output, mask: output['loss'], counts=lambda mask: mask).",
        )

    def begin_batch(self, *, in_parts: bool = False) -> None:
        """Another batch begins. Forwards are not watched for ever, on a GPU only in the first batches."""
        if self.contrasts and in_parts:
            self._tell(
                "contrasts",
                f"return_loss=True: {self._model} compares the samples of each micro-batch alone, so the loss of the "
                "whole batch is another. Use fewer, larger micro-batches, or one.",
            )
        self._num_batches += 1
        self._unequal.begin_batch()

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
        seen = [f"a {each.name} {numbers_text(each)}" for each in terms] + ([others] if others else [])
        weighted = "added up" if self.rule is Rule.SUM and given.may_add else f"weighted by their {self._by(given)}"
        return (
            f"{self._model} computes its own loss from {' and '.join(dict.fromkeys(seen)) or 'other functions'}: the "
            f"pipeline cannot tell how losses of micro-batches combine. They are {weighted}; the loss of the whole "
            "batch may be another. Pass loss_fn to Pipeline, such as pipeloom.mean_over_labels(...)."
        )

    def _by(self, given: Given) -> str:
        by_samples = given.labels is None or given.labels.is_floating_point() or self.rule is Rule.SAMPLES
        return "samples" if by_samples else "labels that count"

    # Warnings

    def tell_empty(self) -> None:
        """A batch has no label that counts."""
        also = "negative ones" if self.ignored is None else f"{self.ignored} and negative ones"
        self._tell("empty", no_labels_count(also))

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


def _is_sum_of(terms: Sequence[Reduction], loss: Tensor) -> bool:
    """Whether a loss has the value of its terms together: another may have a factor that they do not show."""
    return abs(float(sum(each.result.detach() for each in terms)) - float(loss)) <= _NEAR * abs(float(loss))


def _has_label_per_sample(given: Given) -> bool:
    """Whether samples have one label each, which may be the numbers of samples that it is compared with."""
    return given.labels is not None and given.labels.dim() == 1


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
