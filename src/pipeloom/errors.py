"""Every error that pipeloom raises on purpose.

    PipeloomError
    ├── InputError            the caller's input is wrong; the command line answers with exit code 2
    │   ├── ScheduleError     a schedule or program is invalid
    │   ├── SplitError        a model cannot be split as requested
    │   ├── DataError         training data is missing, unreadable or too small
    │   ├── CheckpointError   a checkpoint is unreadable, damaged or does not match the model
    │   ├── PipeTypeError     `Pipe` got a model, value or move of a kind that it does not support (also a TypeError)
    │   └── TooFewDevices     `Pipe` has more partitions than devices (also an IndexError)
    └── RunError              a failure during a run; exit code 1
        ├── StageError        the user's module or loss function raised inside an action
        ├── CallerError       the user's batches or callbacks of a stream raised, or returned an invalid value
        └── PeerLost          the connection to another rank was lost

Each message is one line: ``<name>=<value>: <rule>. <fix>.``
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing it from `typing` would delay the moment from which a command handles Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Iterable


class PipeloomError(Exception):
    """Base class of pipeloom's errors."""


class InputError(PipeloomError, ValueError):
    """Invalid input, found before any communication starts."""


class ScheduleError(InputError):
    """An invalid schedule or program."""


class SplitError(InputError):
    """A model that cannot be split into the requested stages."""


class DataError(InputError):
    """Training data that is missing, unreadable or too small."""


class CheckpointError(InputError):
    """A checkpoint that is unreadable, damaged, or does not match the model.

    Attributes:
        rank: the rank that failed, where ranks save together and all raise; else None.
    """

    rank: int | None = None


class PipeTypeError(InputError, TypeError):
    """A model, a value or a move between devices of a kind that `Pipe` does not support."""


class TooFewDevices(InputError, IndexError):  # noqa: N818  # named after the condition, like PeerLost
    """`Pipe` has more partitions than devices."""


class RunError(PipeloomError, RuntimeError):
    """A failure during a run."""


class StageError(RunError):
    """The user's module, loss function or its backward raised inside an action."""


class CallerError(RunError):
    """The batches, `learning_rate` or `on_update` of a stream raised, or returned an invalid value."""


class PeerLost(RunError):  # noqa: N818  # named after the event, like KeyboardInterrupt
    """The connection to another rank was lost."""


def one_line(error: BaseException) -> str:
    """An error as ``Type: message`` on one line, to quote inside another message; ``Type`` where it has no message."""
    return ": ".join(text for text in (type(error).__name__, unwrapped(str(error))) if text)


def unwrapped(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.split())


def folded(value: object, most: int = 60) -> str:
    """The ``repr`` of a user's value on one line of at most `most` characters, to quote inside a message."""
    from reprlib import Repr

    short = Repr()  # abbreviates while it formats: a value may hold a million actions
    short.maxstring = short.maxother = short.maxlong = most
    try:
        text = short.repr(value)
    except Exception:  # such as ValueError for an int with more digits than Python converts
        text = f"a value of type {type(value).__name__}"
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """`text` on one line of at most `most` characters; the middle of a longer text is left out."""
    text = unwrapped(text)
    if len(text) <= most:
        return text
    kept = most - len("...")
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def either(values: Iterable[object]) -> str:
    """``1``, ``1 or 2``, or ``1, 2 or 4``."""
    *before, last = map(str, values)
    return f"{', '.join(before)} or {last}" if before else last


def listed(values: Iterable[object], most: int = 8) -> str:
    """``0, 1, 2``, or the first `most` values and their number: ``0, 1, ... of 100``."""
    given = list(values)
    first = ", ".join(map(str, given[:most]))
    return first if len(given) <= most else f"{first}, ... of {len(given)}"
