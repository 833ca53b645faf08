"""Every error that pipeloom raises on purpose.

    PipeloomError
    ├── InputError            the caller's input is wrong; the command line answers with exit code 2
    │   ├── ScheduleError     a schedule or program is not legal
    │   ├── SplitError        a model cannot be cut as asked
    │   ├── DataError         training data is missing, unreadable or too small
    │   └── CheckpointError   a checkpoint is foreign, damaged or does not fit the model
    └── RunError              something failed while running; exit code 1
        ├── StageError        the user's module or loss raised inside an action
        ├── CallerError       what the user gave a stream beside its stages raised, or gave something wrong
        └── PeerLost          another rank went away

Each message is one line of three parts: what was seen, the rule it breaks, and the fix.
"""

from __future__ import annotations

TYPE_CHECKING = False  # of `typing`, whose import takes longer than a command should need before it answers Ctrl-C
if TYPE_CHECKING:
    from collections.abc import Iterable


class PipeloomError(Exception):
    """Base class of all errors that pipeloom raises on purpose."""


class InputError(PipeloomError, ValueError):
    """Wrong input, found before any communication started."""


class ScheduleError(InputError):
    """A schedule or program that is not legal."""


class SplitError(InputError):
    """A model that cannot be cut into the stages asked for."""


class DataError(InputError):
    """Training data that is missing, unreadable or too small."""


class CheckpointError(InputError):
    """A checkpoint that is foreign, damaged, or of another model."""


class RunError(PipeloomError, RuntimeError):
    """A failure while a pipeline was running."""


class StageError(RunError):
    """The user's module, loss function or autograd raised inside an action."""


class CallerError(RunError):
    """The batches of a stream, its `learning_rate` or its `on_update` raised, or gave something wrong: no stage did."""


class PeerLost(RunError):  # noqa: N818  # reads as what happened, like KeyboardInterrupt
    """A rank that this rank exchanges messages with went away."""


def one_line(error: BaseException) -> str:
    """An error of somebody else's, for the middle of a message."""
    return f"{type(error).__name__}: {unwrapped(str(error))}"


def unwrapped(text: str) -> str:
    """`text` on one line."""
    return " ".join(text.split())


def folded(value: object, most: int = 60) -> str:
    """A value of the user's as Python writes it, for the middle of a message, on one line of at most `most` letters."""
    from reprlib import Repr

    short = Repr()  # what is long may be a million actions
    short.maxstring = short.maxother = short.maxlong = most
    try:
        text = short.repr(value)
    except Exception:  # of a number with more digits than Python writes
        text = f"a value of type {type(value).__name__}"
    return shortened(text, most)


def shortened(text: str, most: int) -> str:
    """`text` on one line; of what is longer than `most` letters, the middle is left out."""
    text = unwrapped(text)
    if len(text) <= most:
        return text
    kept = most - len("...")
    return f"{text[: kept - kept // 2]}...{text[len(text) - kept // 2 :]}"


def listed(values: Iterable[object], most: int = 8) -> str:
    """``0, 1, 2``, or the first of many: ``0, 1, ... of 100``."""
    given = list(values)
    first = ", ".join(map(str, given[:most]))
    return first if len(given) <= most else f"{first}, ... of {len(given)}"
