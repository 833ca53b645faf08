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


def one_line(error: Exception) -> str:
    """An error of somebody else's, for the middle of a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
