"""User-defined schedules: orders, a function that returns them, or a file.

    mine.csv             the CSV of torch.distributed.pipelining
    mine.json            the output of `pipeloom.ir.text.to_json`, or a plan with the orders of its schedule
    mine.py:function     ``function(num_ranks=..., num_microbatches=...)`` returns a `Schedule` or its orders

All are validated like built-in schedules.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from pipeloom.common.json_reader import parse_file
from pipeloom.errors import InputError, ScheduleError, folded, one_line
from pipeloom.ir import Action, Schedule, check
from pipeloom.ir.check.input_types import as_pairs
from pipeloom.ir.text import from_json, parse_action, schedule_from_orders
from pipeloom.ir.torch_csv import from_csv
from pipeloom.schedules.sizes import check_sizes

Rows = str | Iterable[str | Iterable[Action | str]]


def from_orders(orders: Rows, *, name: str = "own", overlapped: Iterable[tuple[Action, Action]] = ()) -> Schedule:
    """A checked schedule from the orders of its ranks.

    Args:
        orders: the actions of each rank: text with one line per rank, or a sequence of lines (``"0F0 0B0"``) or of
            sequences of actions (``[Action(0, Op.F, 0), ...]``). Placement and sizes follow from the forwards.
        name: the name of the schedule.
        overlapped: pairs of an F and the B or I directly after it that run as one unit.

    Raises:
        ScheduleError: the schedule is not legal.
    """
    rows = orders.strip().splitlines() if isinstance(orders, str) else orders
    try:
        parsed = tuple(tuple(map(_action, row.split() if isinstance(row, str) else row)) for row in rows)
    except TypeError as error:
        raise ScheduleError(
            f"the orders of schedule {name!r} are not rows of actions ({error}). Use one row per rank, such as "
            "'0F0 0B0': 0F0 is stage 0, forward, micro-batch 0."
        ) from error
    schedule = schedule_from_orders(parsed, name=name, overlapped=as_pairs(overlapped, f"schedule {name!r}"))
    check(schedule)
    return schedule


def _action(action: Action | str) -> Action:
    if not isinstance(action, Action | str):
        raise TypeError(f"{folded(action)} is not an Action")
    return action if isinstance(action, Action) else parse_action(action)


def from_function(
    function: Callable[..., Schedule | Rows],
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    name: str | None = None,
) -> Schedule:
    """The checked schedule that a function returns for these sizes.

    Args:
        function: takes ``num_ranks`` and ``num_microbatches``, and optionally ``num_chunks``; returns a `Schedule`, or
            orders as for `from_orders`.
        num_ranks, num_microbatches: sizes of one step.
        num_chunks: virtual stages per rank; None leaves it to the function.
        name: the name of the schedule if the function returns orders; default: the function's name.

    Raises:
        ScheduleError: the function has other parameters, raises, or returns something else or an illegal schedule.
    """
    called = name or str(getattr(function, "__name__", "own"))
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    sizes |= {} if num_chunks is None else {"num_chunks": num_chunks}
    check_sizes(num_ranks, num_microbatches, 1 if num_chunks is None else num_chunks)
    try:
        inspect.signature(function).bind(**sizes)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"function {called!r} cannot be called with {', '.join(sizes)} ({error}): it must take these keyword "
            "arguments. Change its parameters" + ("." if num_chunks is None else ", or leave out the chunks.")
        ) from error
    try:
        made = function(**sizes)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise ScheduleError(
            f"function {called!r} raised {one_line(error)}. Fix it for {num_ranks} ranks and {num_microbatches} "
            "micro-batches."
        ) from error
    if isinstance(made, Schedule):
        check(made)
    else:
        made = from_orders(made, name=called)
    _check_sizes(made, f"function {called!r}", num_ranks, num_microbatches, num_chunks)
    return made


def is_file(source: str) -> bool:
    """Whether `source` names a file with a schedule, not a built-in schedule."""
    path, colon, function = source.rpartition(":")
    return source.endswith((".csv", ".json", ".py")) or bool(colon and path.endswith(".py") and function)


def absolute(source: str) -> str:
    """`source` with an absolute path."""
    if not is_file(source):
        return source
    path, colon, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    return f"{Path(path).absolute()}{colon}{function}"


def from_file(source: str, *, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The checked schedule of ``file.csv``, ``file.json`` or ``file.py:function``.

    Raises:
        ScheduleError: the file cannot be read, is for other sizes, or its schedule is not legal.
    """
    path, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    if path.endswith(".py"):
        found = getattr(_load(Path(path)), function, None) if function else None
        if not callable(found):
            seen = f"has no function {function!r}" if function else "names no function"
            raise ScheduleError(f"schedule {source!r} {seen}. Write {path}:NAME, with the name of a function.")
        return from_function(found, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    parse = from_json if path.endswith(".json") else partial(from_csv, name=Path(path).stem)
    schedule = parse_file("schedule", source, parse, "file", ScheduleError)
    check(schedule)
    _check_sizes(schedule, f"schedule {source!r}", num_ranks, num_microbatches, num_chunks)
    return schedule


def _load(path: Path) -> Any:
    """The module of a Python file, run once for each call."""
    spec = importlib.util.spec_from_file_location(f"_pipeloom_own_{path.stem}", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("not a Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"schedule file {path} cannot be imported ({one_line(error)}). Fix the file.") from error
    return module


def _check_sizes(schedule: Schedule, what: str, ranks: int, microbatches: int, chunks: int | None) -> None:
    """Raises ScheduleError if the schedule has other sizes than the run."""
    for key, made, asked in (
        ("ranks", schedule.num_ranks, ranks),
        ("micro-batches", schedule.num_microbatches, microbatches),
        ("chunks", schedule.placement.num_chunks, chunks),
    ):
        if asked is not None and made != asked:
            raise ScheduleError(
                f"{what} is for {made} {key}, the run has {asked}: they must be equal. Use {made} {key}."
            )
