"""`TypeWatch`: notices a forward that asks for the `type` of a stand-in, which has another class than its layer.

Nothing can be put in place of what `type(layer)` returns; `isinstance` and `layer.__class__` tell the layer's class. In
the Python functions that run, each expression in the source whose type is asked is therefore looked at when they end.
"""

import ast
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_SIMPLE = (ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.UnaryOp, ast.USub, ast.expr_context)
_KEPT = (list, tuple, nn.ModuleList, nn.Sequential)  # which may be read again
_OURS = os.path.dirname(__file__).removesuffix(os.path.join("split", "planned", "tracking"))
_OTHERS = (os.path.dirname(torch.__file__), _OURS)

_parsing = threading.Lock()  # Python 3.11 may raise SystemError where two threads parse at once


class TypeWatch:
    """Notices calls of `type` with a stand-in, a module that tells another class, unless a profiler runs.

    Attributes:
        found: the first such call, and where it is; None: there was none.
    """

    def __init__(self) -> None:
        self.found: str | None = None

    @contextmanager
    def watching(self, active: bool = True) -> Iterator[None]:
        """Inside the block, calls in this thread are noticed, or not."""
        before = sys.getprofile()
        if before not in (None, self._look):
            yield
            return
        sys.setprofile(self._look if active else None)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "return" or "type" not in code.co_names or code.co_filename.startswith(_OTHERS):
            return
        lines = {line for *_, line in code.co_lines()}
        for line, text, expression, is_mapped in _asked(code.co_filename):
            if line in lines and self.found is None:
                try:
                    value = eval(expression, frame.f_globals, frame.f_locals)  # names, attributes and items
                    values = [value] if not is_mapped else list(value) if isinstance(value, _KEPT) else []
                except Exception:
                    continue
                if any(issubclass(type(each), nn.Module) and each.__class__ is not type(each) for each in values):
                    self.found = f"{text} in {os.path.basename(code.co_filename)}, line {line}"


class _Calls(ast.NodeVisitor):
    """The calls of `type`, or `map(type, ...)`, with one simple expression, except for messages."""

    def __init__(self) -> None:
        self.found: list[ast.Call] = []

    def visit_Call(self, node: ast.Call) -> None:
        names = [each.id if isinstance(each, ast.Name) else "" for each in (node.func, *node.args)]
        asks = names[:-1] in (["type"], ["map", "type"])
        if asks and all(isinstance(each, _SIMPLE) for each in ast.walk(node.args[-1])):
            self.found.append(node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Its message may name a type."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text may name a type."""


@lru_cache(maxsize=256)
def _asked(path: str) -> tuple[tuple[int, str, CodeType, bool], ...]:
    """Where a file asks for types: the line, the call, its argument compiled, and whether it asks each item."""
    calls = _Calls()
    try:
        with _parsing:
            parsed = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ()
    calls.visit(parsed)
    return tuple(
        (call.lineno, ast.unparse(call), compile(ast.Expression(call.args[-1]), path, "eval"), len(call.args) > 1)
        for call in calls.found
    )
