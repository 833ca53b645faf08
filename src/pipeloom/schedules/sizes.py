"""Sizes that no schedule has, refused for every function that makes one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from pipeloom.errors import ScheduleError

P = ParamSpec("P")
R = TypeVar("R")


def check_sizes(num_ranks: int, num_microbatches: int, num_chunks: int, num_slices: int = 1) -> None:
    """Refuse sizes that no schedule has.

    Raises:
        ScheduleError: one of them is no whole number, or below 1.
    """
    sizes = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks": num_chunks, "slices": num_slices}
    for what, value in sizes.items():
        check_size(what, value)


def sized(build: Callable[P, R]) -> Callable[P, R]:
    """`build` that looks at its arguments ``num_...`` first; raises ScheduleError as `check_sizes` does."""

    parameters = inspect.signature(build).parameters
    optional = {name for name, parameter in parameters.items() if parameter.default is None}

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        for name, value in options.items():
            if name.startswith("num_") and not (value is None and name in optional):
                check_size(name.removeprefix("num_").replace("microbatches", "micro-batches").replace("_", " "), value)
        return build(*args, **options)

    return checked


def check_size(what: str, value: object) -> None:
    """Refuse what is no number of things, at least 1.

    Raises:
        ScheduleError: it is not.
    """
    if not hasattr(value, "__index__"):
        raise ScheduleError(f"{value!r} {what}: how many there are is an int; pass one")
    if value.__index__() < 1:
        raise ScheduleError(f"{value} {what}: a pipeline needs at least 1; raise it")
