"""Validate the sizes and keywords of the functions that make schedules."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import ParamSpec, TypeVar

from pipeloom.errors import ScheduleError, folded
from pipeloom.ir.order import MOST_MICROBATCHES, MOST_SLICES, MOST_STAGES

P = ParamSpec("P")
R = TypeVar("R")

MOST_ACTIONS = 20_000_000
"""Most forwards and backwards per schedule: to check and simulate as many takes minutes and gigabytes.

Families whose order is found action by action have fewer, and the search, which times actions repeatedly.
"""

_OTHER_NAMES = {  # names of these keywords in other libraries
    "num_ranks": ("ranks", "p", "pp", "pp_size", "num_stages", "stages", "world_size"),
    "num_microbatches": ("microbatches", "micro_batches", "num_micro_batches", "n_microbatches", "m"),
    "num_chunks": ("chunks", "v", "virtual", "virtual_stages", "num_virtual_stages", "num_model_chunks", "interleave"),
    "num_slices": ("slices", "k", "num_seqs", "seq_chunks"),
}


def check_sizes(
    num_ranks: int, num_microbatches: int, num_chunks: int, num_slices: int = 1, *, most: int = MOST_ACTIONS
) -> None:
    """Validate sizes before any action is made.

    Raises:
        ScheduleError: a size is not an int or below 1, or there would be more than `most` forwards and backwards.
    """
    sizes = {"ranks": num_ranks, "micro-batches": num_microbatches, "chunks": num_chunks, "slices": num_slices}
    for what, value in sizes.items():
        check_size(what, value)
    _check_count(sizes, most)


def _check_count(sizes: Mapping[str, int], most: int) -> None:
    """Raises ScheduleError for more actions than `most`, or a size that does not fit into an `Order`."""
    limits = {"micro-batches": MOST_MICROBATCHES, "slices": MOST_SLICES}
    for what, value in sizes.items():
        limit = limits.get(what, MOST_STAGES)
        if value > limit:
            raise ScheduleError(f"{value:,} {what}: a schedule has at most {limit:,}. Use smaller sizes.")
    actions = 2 * prod(sizes.values())
    if actions > most:
        asked = " x ".join(f"{value} {what}" for what, value in sizes.items())
        raise ScheduleError(
            f"{asked} are {actions:,} forwards and backwards: this schedule has at most {most:,}. Use smaller sizes "
            "or read the closed forms of `pipeloom schedules`."
        )


def sized(build: Callable[P, R]) -> Callable[P, R]:
    """`build`, which takes keywords only, with its keywords and its arguments ``num_...`` validated first.

    It raises ScheduleError for positional, unknown and missing arguments, and for sizes as `check_sizes` does.
    """
    parameters = inspect.signature(build).parameters
    optional = {name for name, parameter in parameters.items() if parameter.default is None}

    @keyword_checked
    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        sizes: dict[str, int] = {}
        for name, value in options.items():
            if name.startswith("num_") and not (value is None and name in optional):
                what = name.removeprefix("num_").replace("microbatches", "micro-batches").replace("_", " ")
                sizes[what] = check_size(what, value)
        _check_count(sizes, MOST_ACTIONS)
        return build(*args, **options)

    return checked


def keyword_checked(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises ScheduleError naming its keywords where Python would raise TypeError for the call."""
    parameters = dict(inspect.signature(function).parameters)
    kinds = {name: parameter.kind for name, parameter in parameters.items()}
    others = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD]
    for name in others:
        del parameters[name]
    positional = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    called = function.__name__
    signature = f"{called}({', '.join(parameters)})"

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if len(args) > len(positional):
            written = [folded(value) for value in args]
            named = [*written[: len(positional)]]
            named += [
                f"{n}={w}" for n, w in zip([*parameters][len(positional) :], written[len(positional) :], strict=False)
            ]
            rule = f"only `{positional[0]}` is positional" if positional else "all arguments are keyword arguments"
            raise ScheduleError(f"{called}({', '.join(written)}): {rule}. Write {called}({', '.join(named)}).")
        for name, value in options.items():
            if name not in parameters and not others:
                raise ScheduleError(unknown_keyword(name, value, signature, parameters))
        for name in [*parameters][len(args) :]:
            if parameters[name].default is inspect.Parameter.empty and name not in options:
                for other in options.keys() - parameters.keys():
                    if _meant(other, parameters) == name:
                        raise ScheduleError(unknown_keyword(other, options[other], signature, parameters))
                raise ScheduleError(f"{signature} needs `{name}`: it has no default. Add {name}=...")
        return function(*args, **options)

    return checked


def unknown_keyword(name: str, value: object, called: str, known: Iterable[str]) -> str:
    """The error message for an unknown keyword, with the keyword that is probably meant."""
    names = [*known]
    meant = _meant(name, names)
    fix = f"Use `{meant}`." if meant else f"It takes {', '.join(names)}."
    return f"{name}={folded(value)}: {called} has no argument `{name}`. {fix}"


def _meant(name: str, known: Iterable[str]) -> str | None:
    names = [*known]
    same = [keyword for keyword, others in _OTHER_NAMES.items() if name in others and keyword in names]
    return next(iter(same or difflib.get_close_matches(name, names, n=1)), None)


def check_size(what: str, value: object) -> int:
    """`value` as an int. Raises ScheduleError if it is not an int or below 1."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ScheduleError(f"{folded(value)} {what}: must be an int. Pass a number such as 4.")
    number: int = value.__index__()
    if number < 1:
        raise ScheduleError(f"{number} {what}: must be at least 1.")
    return number
