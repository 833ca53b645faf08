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
        for line, text, expression in _asked(code.co_filename):
            if line in lines and self.found is None:
                try:
                    value = eval(expression, frame.f_globals, frame.f_locals)  # names, attributes and items
                except Exception:
                    continue
                if issubclass(type(value), nn.Module) and value.__class__ is not type(value):
                    self.found = f"type({text}) in {os.path.basename(code.co_filename)}, line {line}"


class _Calls(ast.NodeVisitor):
    """The calls of `type` with one simple expression, except for messages."""

    def __init__(self) -> None:
        self.found: list[ast.Call] = []

    def visit_Call(self, node: ast.Call) -> None:
        is_type = isinstance(node.func, ast.Name) and node.func.id == "type"
        if is_type and len(node.args) == 1 and all(isinstance(each, _SIMPLE) for each in ast.walk(node.args[0])):
            self.found.append(node)
        self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Its message may name a type."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """A text may name a type."""


@lru_cache(maxsize=256)
def _asked(path: str) -> tuple[tuple[int, str, CodeType], ...]:
    """Where a file asks for the type of what: the line, the expression, and the same compiled."""
    calls = _Calls()
    try:
        with _parsing:
            parsed = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return ()
    calls.visit(parsed)
    arguments = [(call.lineno, call.args[0]) for call in calls.found]
    return tuple((line, ast.unparse(a), compile(ast.Expression(a), path, "eval")) for line, a in arguments)
