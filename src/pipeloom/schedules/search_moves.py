"""Improvement phase of the search: shift actions on the critical path, late acceptance (Burke and Bykov, 2017)."""

from __future__ import annotations

import random

from pipeloom.schedules.search_work import IntOrders, Work

_HISTORY = 40  # a move is kept if it is no worse than what was current so many moves ago
_NEAR = 1e-9


def improve(work: Work, orders: IntOrders, bound: float, moves: int, rng: random.Random) -> tuple[float, IntOrders]:
    """The best makespan and orders found from `orders` with `moves` tries; stops at `bound`, keeps all caps.

    On the critical path, what delays an action is the one before it on its own rank or a value from another rank. A
    run of actions of one rank in which each delays the next is a block. Only taking an action to the front or the back
    of its block, or out of it, can shorten the step.
    """
    ended = work.ends(orders)
    assert ended is not None
    orders = [list(order) for order in orders]
    current = _score(work, ended, orders)
    best, best_orders = current, [list(order) for order in orders]
    blocks: list[tuple[int, int, int]] | None = None
    history = [current] * _HISTORY
    for number in range(moves):
        if best[0] <= bound * (1 + _NEAR):
            break
        if blocks is None:
            blocks = [block for block in _critical_blocks(work, orders, ended) if block[2] > block[1]]
        rank, source, target = _pick(orders, blocks, rng)
        order = orders[rank]
        action = order.pop(source)
        order.insert(target, action)
        tried = None
        if work.fits(rank, order):
            tried = work.ends(orders)
        place = number % _HISTORY
        if tried is not None and (score := _score(work, tried, orders)) <= max(history[place], current):
            current, ended, blocks = score, tried, None
            if score < best:
                best, best_orders = score, [list(row) for row in orders]
        else:
            order.insert(source, order.pop(target))
        history[place] = min(history[place], current)
    return best[0], best_orders


def _score(work: Work, ended: list[float], orders: IntOrders) -> tuple[float, float]:
    """The makespan; among equal ones, earlier ends of all ranks are better."""
    last = [ended[order[-1]] for order in orders if order]
    return round(max(last), 12), sum(last)


def _pick(orders: IntOrders, blocks: list[tuple[int, int, int]], rng: random.Random) -> tuple[int, int, int]:
    """A rank and the positions from and to which one action of a critical block moves."""
    rank, first, last = rng.choice(blocks) if blocks else _anywhere(orders, rng)
    if rng.random() < 0.5:  # something of the block to its front (or before), so that it ends earlier
        source = rng.randint(first + 1, last)
        target = max(0, first - rng.choice((0, 0, 1, 2))) if rng.random() < 0.7 else rng.randint(first, source - 1)
    else:
        source = rng.randint(first, last - 1)
        size = len(orders[rank])
        target = min(size - 1, last + rng.choice((0, 0, 1, 2))) if rng.random() < 0.7 else rng.randint(source + 1, last)
    return rank, source, target


def _anywhere(orders: IntOrders, rng: random.Random) -> tuple[int, int, int]:
    rank = rng.choice([rank for rank, order in enumerate(orders) if len(order) > 1])
    return rank, 0, len(orders[rank]) - 1


def _critical_blocks(work: Work, orders: IntOrders, ended: list[float]) -> list[tuple[int, int, int]]:
    """``(rank, first, last)`` positions of the runs that the longest chain takes through the ranks, last to first."""
    position = {n: at for order in orders for at, n in enumerate(order)}
    n = max((order[-1] for order in orders if order), key=lambda last: ended[last])
    blocks = []
    while True:
        rank = work.rank[n]
        order = orders[rank]
        last = at = position[n]
        start = ended[n] - work.seconds[n]
        while at and ended[order[at - 1]] >= start - _NEAR:
            at -= 1
            start = ended[order[at]] - work.seconds[order[at]]
        blocks.append((rank, at, last))
        before = [need for need, lag in work.needs[order[at]] if ended[need] + lag >= start - _NEAR and start > _NEAR]
        before = [need for need in before if work.rank[need] != rank]
        if not before:
            return blocks
        n = before[0]
