"""Evolutionary search over the rules of the greedy phase."""

import numpy as np
import numpy.typing as npt

from pipeloom.schedules.search.greedy import Floats, Shop
from pipeloom.schedules.search.operations import IntOrders, Work

_CHILDREN = 160  # rules that are played at once
_PARENTS = 32  # rules that are kept
_STALE = 40  # generations without a shorter step after which no more are bred
_FEW = 12  # micro-batches with which rules are bred first
_TOGETHER = 0.5  # of the children that also change all ranks alike
_NEAR = 1e-9
_NO_LIMIT = 1e6


def evolve(work: Work, effort: int, bound: float, seed: int) -> list[tuple[float, IntOrders]]:
    """The best schedules found by playing rules for about `effort` microseconds; shortest first.

    Half of the effort is spent on the same step with fewer micro-batches, where playing a rule is faster.

    Args:
        work: the step.
        effort: work limit, see `Shop.spent`; at least one generation is played.
        bound: makespan at which the search stops.
        seed: seed of the random rules.
    """
    shop = Shop(work)
    draw = np.random.default_rng(seed)
    unit = float(np.mean(work.seconds)) or 1.0
    rules = _first_rules(shop, draw, unit)
    if work.num_microbatches >= 3 * _FEW // 2:
        less = Shop(Work(work.placement, _FEW, work.conditions))
        rules, _, _ = _generations(less, rules, effort // 2, 0.0, draw, unit)
        effort -= less.spent
    rules, spans, orders = _generations(shop, rules, effort, bound, draw, unit)
    return [(float(span), shop.orders(row)) for span, row in zip(spans, orders, strict=True)]


def _generations(
    shop: Shop, rules: Floats, effort: int, bound: float, draw: np.random.Generator, unit: float
) -> tuple[Floats, Floats, npt.NDArray[np.int32]]:
    """The best rules that descend from `rules`, their makespans, shortest first, and their orders."""
    spans, orders = shop.play(rules)
    stale, best = 0, np.inf
    while True:
        if best < np.inf:
            children = _children(shop, rules, draw, unit)
            played, made = shop.play(children, spans[-1] * (1 + _NEAR) if len(spans) == _PARENTS else np.inf)
            rules = np.concatenate([children, rules])
            spans, orders = np.concatenate([played, spans]), np.concatenate([made, orders])
        # Of rules that are equally good the youngest stays: it may have wandered to where a next step is better.
        _, kept = np.unique(np.round(spans / unit, 7), return_index=True)
        kept = kept[np.isfinite(spans[kept])][:_PARENTS]
        rules, spans, orders = rules[kept], spans[kept], orders[kept]
        stale = 0 if spans[0] < best * (1 - _NEAR) else stale + 1
        best = spans[0]
        if best <= bound * (1 + _NEAR) or shop.spent >= effort or stale == _STALE:
            return rules, spans, orders


def _first_rules(shop: Shop, draw: np.random.Generator, unit: float) -> Floats:
    """Random rules around the usual ones: forwards or backwards first, W in waits, 1F1B's in-flight micro-batches."""
    ranks, c = shop.stages.shape
    rules = np.zeros((_CHILDREN, ranks, shop.genes))
    chunk = np.arange(c)

    def one_of(*choices: float) -> Floats:
        return draw.choice(choices, (_CHILDREN, 1, 1))

    rules[:, :, :c] += unit * one_of(-2.0, -0.5, 0.0, 0.5) * chunk
    rules[:, :, c : 2 * c] += unit * (one_of(-4.0, -1.0, 0.0, 1.0) + one_of(-1.0, 0.0, 1.0) * chunk)
    rules[:, :, 2 * c : 3 * c] += unit * one_of(0.0, 0.5, 2.0, 8.0)
    rules[:, :, : 3 * c] += unit * one_of(0.0, 0.3, 1.0) * draw.normal(size=(_CHILDREN, ranks, 3 * c))
    depth = shop.stages.max() + 1 - shop.stages
    rules[:, :, 3 * c : 4 * c] = np.ceil(depth * one_of(0.5, 0.75, 1.0, 1.5, 2.0, _NO_LIMIT, _NO_LIMIT))
    rules[:, :, 4 * c] = unit * one_of(0.0, 0.5, 100.0)[:, :, 0]
    return rules.reshape(_CHILDREN, -1)


def _children(shop: Shop, parents: Floats, draw: np.random.Generator, unit: float) -> Floats:
    """Mutated children: better parents have more of them, and some children mix two parents."""
    (ranks, c), genes = shop.stages.shape, shop.genes
    count, size = _CHILDREN, parents.shape[1]
    children = parents[(len(parents) * draw.random(count) ** 2).astype(np.int64)]
    mates = parents[(len(parents) * draw.random(count)).astype(np.int64)]
    mixed = (draw.random((count, 1)) < 0.3) & (draw.random((count, size)) < 0.3)
    children = np.where(mixed, mates, children)
    scale = np.tile(np.array([unit] * (3 * c) + [1.5] * c + [unit]), ranks)
    changed = draw.random((count, size)) < draw.choice([1.0 / size, 3.0 / size, 0.1, 0.3], (count, 1))
    changed[np.arange(count), draw.integers(size, size=count)] = True
    steps = draw.normal(size=(count, size)) * scale * draw.choice([0.1, 0.4, 1.0, 3.0], (count, 1))
    limits = np.tile(np.arange(genes) // c == 3, ranks)
    unlimited = limits & (children > 0.5 * _NO_LIMIT)
    usual = np.zeros((ranks, genes))
    usual[:, 3 * c : 4 * c] = shop.stages.max() + 1 - shop.stages
    steps = np.where(unlimited, usual.reshape(-1) - children + steps, steps)
    freed = limits & (draw.random((count, size)) < 0.15)
    steps = np.where(freed, _NO_LIMIT - children, steps)
    children = children + changed * steps
    together = draw.random(count) < _TOGETHER  # one number of all ranks by the same step
    column = draw.integers(genes, size=count)
    shaped = children.reshape(count, ranks, genes)
    shaped[np.arange(count), :, column] += (together * draw.normal(size=count) * scale[column])[:, None]
    result: Floats = shaped.reshape(count, size)
    result[:, limits] = np.maximum(result[:, limits], 1.0)
    return result
