"""Sizes that no schedule has, refused for every function that makes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, ParamSpec, TypeVar

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.large.order import MOST_MICROBATCHES, MOST_SLICES, MOST_STAGES

P = ParamSpec("P")
R = TypeVar("R")


MOST_ACTIONS = 20_000_000
"""Forwards and backwards of the largest schedule that is made: to check and simulate it takes minutes and gigabytes."""

MOST = dict.fromkeys(("zb-auto", "v-half", "v-min", "chimera", "hanayo"), 1_000_000) | {"search": 20_000}
"""The same of families whose order is found moment by moment, and of the search, which times actions over and over."""


def check_sizes(
    num_ranks: int, num_microbatches: int, num_chunks: int, num_slices: int = 1, *, most: int = MOST_ACTIONS
) -> None:
    """Refuse sizes that no schedule has, and those of more than `most` forwards and backwards, before any is made.

    Raises:
        ScheduleError: one of them is no whole number, or below 1, or there would be too many actions.
    """
    sizes = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks": num_chunks, "slices": num_slices}
    for what, value in sizes.items():
        check_size(what, value)
    _check_count(sizes, most)


def _check_count(sizes: Mapping[str, int], most: int) -> None:
    """Refuse too many actions, or more of one kind than an `Order` counts."""
    limits = {"micro-batches": MOST_MICROBATCHES, "slices": MOST_SLICES}
    for what, value in sizes.items():
        limit = limits.get(what, MOST_STAGES)
        if value > limit:
            raise ScheduleError(f"{value:,} {what}: a schedule has at most {limit:,}; ask for fewer")
    actions = 2 * prod(sizes.values())
    if actions > most:
        asked = " x ".join(f"{value} {what}" for what, value in sizes.items())
        raise ScheduleError(
            f"{asked} are {actions:,} forwards and backwards: at most {most:,} are made of this schedule; ask for "
            "fewer, or read the closed forms of `pipeloom schedules`"
        )


def sized(build: Callable[P, R]) -> Callable[P, R]:
    """`build` that looks at its arguments ``num_...`` first; raises ScheduleError as `check_sizes` does."""

    parameters = inspect.signature(build).parameters
    optional = {name for name, parameter in parameters.items() if parameter.default is None}

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        sizes: dict[str, Any] = {}
        for name, value in options.items():
            if name.startswith("num_") and not (value is None and name in optional):
                what = name.removeprefix("num_").replace("microbatches", "micro-batches").replace("_", " ")
                check_size(what, value)
                sizes[what] = value
        _check_count(sizes, MOST_ACTIONS)
        return build(*args, **options)

    return checked


def check_size(what: str, value: object) -> None:
    """Refuse what is no number of things, at least 1.

    Raises:
        ScheduleError: it is not.
    """
    if not hasattr(value, "__index__"):
        raise ScheduleError(f"{folded(value)} {what}: how many there are is an int; pass one")
    if value.__index__() < 1:
        raise ScheduleError(f"{value} {what}: a pipeline needs at least 1; raise it")
