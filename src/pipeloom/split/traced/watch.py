"""What the code of a model does beside computing with torch: errors that it handles, and numbers that it draws.

Python's trace function sees both, in the frames of the model: those that torch.nn calls, and those that they call.
"""

import linecache
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeloom.common.random_states import RandomStates

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
# Files that call the code of models.
_OF_TORCH = ("nn/modules/module", "autograd/function", "amp/autocast_mode", "utils/_contextlib", "utils/checkpoint")
_CALLERS = (*(f"{_TORCH}/{name}.py" for name in _OF_TORCH), _PACKAGE)
_ENDS_OF_LOOPS = (StopIteration, StopAsyncIteration, GeneratorExit)
_DRAWING = (random.__file__, str(Path(np.__file__).parent))


class Line(NamedTuple):
    """A line of code.

    Attributes:
        file: its path.
        number: from 1.
        error: name of the error that is handled there; empty: none.
    """

    file: str
    number: int
    error: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.number}, {linecache.getline(self.file, self.number).strip()!r}"


@contextmanager
def handled_errors(found: dict[Line, BaseException]) -> Iterator[None]:
    """In the block, calls of models are watched; afterwards `found` has the errors that they handled.

    Args:
        found: gets each error by the line in the handling function that raised it, or called what did.
    """
    errors: dict[int, BaseException] = {}
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception" and not isinstance(arg[1], _ENDS_OF_LOOPS):
            errors[id(arg[1])] = arg[1]
            codes.add(frame.f_code)
        return note

    with _frames_of_models(note, lines=False):
        yield
    for error in errors.values():
        ended = error.__traceback__  # begins in the frame that handled the error
        if ended is not None and ended.tb_frame.f_code in codes:
            found[Line(ended.tb_frame.f_code.co_filename, ended.tb_lineno, type(error).__name__)] = error
    errors.clear()


@contextmanager
def _frames_of_models(note: Callable[[FrameType, str, Any], Any], *, lines: bool) -> Iterator[None]:
    """In the block, `note` gets the events of the frames of models in this thread.

    Args:
        note: a local trace function.
        lines: whether it gets an event per line.
    """
    is_outside: dict[CodeType, bool] = {}

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        outside = is_outside.get(code)
        if outside is None:
            outside = is_outside[code] = not code.co_filename.startswith((_TORCH, _PACKAGE, "<"))
        caller = frame.f_back
        if not outside or caller is None:
            return None
        if caller.f_trace is None and not caller.f_code.co_filename.startswith(_CALLERS):
            return None
        frame.f_trace_lines = lines
        return note(frame, event, arg)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


class OtherGenerators:
    """The states of Python's and numpy's global random generators."""

    def __init__(self) -> None:
        self._states = RandomStates.now()

    def drawn(self) -> list[str]:
        """Names of the generators whose states have changed."""
        pairs = zip(("random", "numpy.random"), self._states, RandomStates.now(), strict=True)
        return [name for name, before, now in pairs if before != now]

    def restore(self) -> None:
        """Set the states of before."""
        self._states.restore()

    def line_that_draws(self, run: Callable[[], Any]) -> Line | None:
        """The line of a model, called by `run`, that first changes a state; None: no line is known."""
        last: list[Line] = []
        found: list[Line] = []

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            if not found and last and self.drawn():
                found.append(last[-1])
            if event == "line" and not frame.f_code.co_filename.startswith(_DRAWING):
                last[:] = [Line(frame.f_code.co_filename, frame.f_lineno)]
            return note

        with _frames_of_models(note, lines=True):
            run()
        return found[0] if found else None
