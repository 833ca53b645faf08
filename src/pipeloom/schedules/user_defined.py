"""A schedule that somebody brings along: orders, a function that returns them, or a file of either.

    mine.csv             the CSV of torch.distributed.pipelining
    mine.json            what `pipeloom.ir.text.to_json` writes, or a plan with the orders of its schedule
    mine.py:function     ``function(num_ranks=..., num_microbatches=...)`` returns a `Schedule` or its orders

Each is checked like every other schedule, and refused in one line where it is not legal.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pipeloom.errors import InputError, ScheduleError, folded, one_line
from pipeloom.ir import Action, Schedule, check
from pipeloom.ir.check.input_types import as_pairs
from pipeloom.ir.from_orders import schedule_from_orders
from pipeloom.ir.text import from_json, parse_action
from pipeloom.ir.torch_csv import from_csv
from pipeloom.schedules.sizes import check_sizes

Rows = str | Iterable[str | Iterable[Action | str]]


def from_orders(orders: Rows, *, name: str = "own", overlapped: Iterable[tuple[Action, Action]] = ()) -> Schedule:
    """A checked schedule from the orders of its ranks.

    Args:
        orders: for each rank its actions: a text with one line a rank, or a sequence of lines, or of sequences of
            actions; ``"0F0 0B0"`` or ``[Action(0, Op.F, 0), ...]``. Placement and sizes are read off the forwards.
        name: under which it is reported.
        overlapped: pairs of an F and the B or I behind it that run as one unit.

    Raises:
        ScheduleError: it is no legal schedule.
    """
    rows = orders.strip().splitlines() if isinstance(orders, str) else orders
    try:
        parsed = tuple(tuple(map(_action, row.split() if isinstance(row, str) else row)) for row in rows)
    except TypeError as error:
        raise ScheduleError(
            f"the orders of schedule {name!r} are no sequence of rows of actions ({error}): give one row a rank, such "
            "as '0F0 0B0'"
        ) from error
    schedule = schedule_from_orders(parsed, name=name, overlapped=as_pairs(overlapped, f"schedule {name!r}"))
    check(schedule)
    return schedule


def _action(action: Action | str) -> Action:
    if isinstance(action, Action):
        return action
    if isinstance(action, str):
        return parse_action(action)
    raise TypeError(f"{folded(action)} is no Action")


def from_function(
    function: Callable[..., Schedule | Rows],
    *,
    num_ranks: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    name: str | None = None,
) -> Schedule:
    """The checked schedule that a function makes for these sizes.

    Args:
        function: takes ``num_ranks`` and ``num_microbatches``, and ``num_chunks`` if it likes; returns a `Schedule`, or
            what `from_orders` takes.
        num_ranks, num_microbatches: of one step.
        num_chunks: stages a rank; None leaves it to the function.
        name: under which it is reported, if the function does not return a `Schedule`; the function's own if None.

    Raises:
        ScheduleError: the function takes or returns something else, raises, or what it makes is not legal.
    """
    called = name or str(getattr(function, "__name__", "own"))
    sizes = {"num_ranks": num_ranks, "num_microbatches": num_microbatches}
    if num_chunks is not None:
        sizes["num_chunks"] = num_chunks
    check_sizes(num_ranks, num_microbatches, 1 if num_chunks is None else num_chunks)
    try:
        inspect.signature(function).bind(**sizes)
    except (TypeError, ValueError) as error:
        raise ScheduleError(
            f"function {called!r} cannot be called with {', '.join(sizes)} ({error}): a schedule's function takes "
            "these by name; change its parameters" + ("" if num_chunks is None else ", or leave the chunks out")
        ) from error
    try:
        made = function(**sizes)
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise ScheduleError(
            f"function {called!r} raised {one_line(error)}; correct it for "
            f"{num_ranks} ranks and {num_microbatches} micro-batches"
        ) from error
    if isinstance(made, Schedule):
        check(made)
    else:
        made = from_orders(made, name=called)
    _check_sizes(made, f"function {called!r}", num_ranks, num_microbatches, num_chunks)
    return made


def is_file(source: str) -> bool:
    """Whether `source` names a file with a schedule, rather than a schedule of the table."""
    path, colon, function = source.rpartition(":")
    return source.endswith((".csv", ".json", ".py")) or bool(colon and path.endswith(".py") and function)


def absolute(source: str) -> str:
    """`source` so that it means the same from any directory."""
    if not is_file(source):
        return source
    path, colon, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    return f"{Path(path).absolute()}{colon}{function}"


def from_file(source: str, *, num_ranks: int, num_microbatches: int, num_chunks: int | None = None) -> Schedule:
    """The checked schedule of ``file.csv``, ``file.json`` or ``file.py:function``.

    Raises:
        ScheduleError: the file cannot be read, is for other sizes, or holds no legal schedule.
    """
    path, _, function = source.rpartition(":") if ".py:" in source else (source, "", "")
    if path.endswith(".py"):
        found = getattr(_load(Path(path)), function, None) if function else None
        if not callable(found):
            seen = f"has no function {function!r}" if function else "names no function"
            raise ScheduleError(f"schedule {source!r} {seen}: write {path}:NAME, a function of that file")
        return from_function(found, num_ranks=num_ranks, num_microbatches=num_microbatches, num_chunks=num_chunks)
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ScheduleError(f"schedule {source!r}: {reason}; name a readable file") from error
    try:
        schedule = from_json(text) if path.endswith(".json") else from_csv(text, name=Path(path).stem)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {source!r}: {error}") from error
    check(schedule)
    _check_sizes(schedule, f"schedule {source!r}", num_ranks, num_microbatches, num_chunks)
    return schedule


def _load(path: Path) -> Any:
    """The module of a Python file, run once for each call."""
    spec = importlib.util.spec_from_file_location(f"_pipeloom_own_{path.stem}", path)
    try:
        if spec is None or spec.loader is None:
            raise ImportError("it is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ScheduleError(f"schedule file {path} cannot be run ({one_line(error)}); correct it") from error
    return module


def _check_sizes(schedule: Schedule, what: str, ranks: int, microbatches: int, chunks: int | None) -> None:
    """Refuse a schedule that is for other sizes than asked for."""
    asked = {"ranks": ranks, "micro-batches": microbatches, "chunks": chunks}
    made = {
        "ranks": schedule.num_ranks,
        "micro-batches": schedule.num_microbatches,
        "chunks": schedule.placement.num_chunks,
    }
    for key, number in asked.items():
        if number is not None and made[key] != number:
            raise ScheduleError(
                f"{what} is for {made[key]} {key}, the run has {number}: they must be equal; ask for {made[key]}"
            )
