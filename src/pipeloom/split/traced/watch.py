"""What the code of a model does beside computing with torch: errors that it handles, and numbers that it draws.

Python sees both in the frames of the model: those that torch.nn calls, and those that they call. From Python 3.12 on,
`sys.monitoring` tells of errors that are handled, without a cost for all else. Before, only a trace function does, and
Python calls it for each call of a function: it is set while the model's forward runs, not inside of torch's functions.
"""

import linecache
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

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
def handled_errors(model: nn.Module, found: dict[Line, BaseException]) -> Iterator[None]:
    """In the block, calls of a model are watched; afterwards `found` has the errors that its code handled.

    Args:
        model: called in the block.
        found: gets each error by the line in the handling function that raised it, or called what did.
    """
    errors: dict[int, BaseException] = {}
    codes: set[CodeType] = set()

    def note(code: CodeType, error: BaseException) -> None:
        if not isinstance(error, _ENDS_OF_LOOPS):
            errors[id(error)] = error
            codes.add(code)

    tool = _free_tool()
    with _errors_traced(model, note) if tool is None else _errors_monitored(tool, note):
        yield
    for error in errors.values():
        ended = error.__traceback__  # begins in the frame that handled the error
        if ended is not None and ended.tb_frame.f_code in codes:
            found[Line(ended.tb_frame.f_code.co_filename, ended.tb_lineno, type(error).__name__)] = error
    errors.clear()


def _free_tool() -> int | None:
    """A number for a tool of `sys.monitoring` that neither Python's documentation nor another tool takes."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return None if monitoring is None else next((n for n in (4, 3) if monitoring.get_tool(n) is None), None)


@contextmanager
def _errors_monitored(tool: int, note: Callable[[CodeType, BaseException], None]) -> Iterator[None]:
    """In the block, `note` gets the errors that reach a handler in a frame of a model in this thread."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    event, thread, is_outside = monitoring.events.EXCEPTION_HANDLED, threading.get_ident(), _Outside()

    def handled(code: CodeType, offset: int, error: BaseException) -> None:
        if not is_outside[code.co_filename] or threading.get_ident() != thread:
            return
        caller = sys._getframe(1).f_back
        while caller is not None and is_outside[caller.f_code.co_filename]:
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename.startswith(_CALLERS):
            note(code, error)

    monitoring.use_tool_id(tool, "pipeloom")
    try:
        monitoring.register_callback(tool, event, handled)
        monitoring.set_events(tool, event)
        yield
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


@contextmanager
def _errors_traced(model: nn.Module, note: Callable[[CodeType, BaseException], None]) -> Iterator[None]:
    """In the block, `note` gets the errors that reach a frame of a model in this thread, by a trace function."""

    def local(frame: FrameType, event: str, arg: Any) -> Any:
        if event == "exception":
            note(frame.f_code, arg[1])
        return local

    calls: list[ExitStack] = []  # of the model; it may call itself

    def begin(*_: Any) -> None:
        calls.append(ExitStack())
        if calls[1:]:
            return
        if torch.compiler.is_exporting():  # which runs much Python inside of torch's functions
            calls[0].enter_context(_Untraced())
        calls[0].enter_context(_frames_of_models(local, lines=False))

    def end(*_: Any) -> None:
        calls.pop().close()

    hooks = [
        model.register_forward_pre_hook(begin, prepend=True),
        model.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while calls:
            end()


class _Untraced(TorchFunctionMode):
    """In the block, torch's functions run without a trace function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            sys.settrace(trace)


class _Outside(dict[str, bool]):
    """Whether code is neither torch's nor of this package, by its file. The hash of a code object takes long."""

    def __missing__(self, file: str) -> bool:
        self[file] = outside = not file.startswith((_TORCH, _PACKAGE, "<"))
        return outside


@contextmanager
def _frames_of_models(note: Callable[[FrameType, str, Any], Any], *, lines: bool) -> Iterator[None]:
    """In the block, `note` gets the events of the frames of models in this thread.

    Args:
        note: a local trace function.
        lines: whether it gets an event per line.
    """
    is_outside = _Outside()

    def enter(frame: FrameType, event: str, arg: Any) -> Any:
        caller = frame.f_back
        if not is_outside[frame.f_code.co_filename] or caller is None:
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
