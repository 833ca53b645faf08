"""The argument parser of every command: errors are one line, with the nearest right name, and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Types and defaults in the help; descriptions and examples keep their line breaks."""


class Parser(ArgumentParser):
    """jsonargparse's parser, with errors for people.

    A mistyped option is answered with the nearest right one. Every error is one line on stderr, exit code 2.
    Abbreviated options are refused, so that a script keeps its meaning when options are added.

    Args:
        prog: the command as typed, such as ``pipeloom simulate``.
        description: one paragraph.
        examples: lines that can be pasted into a shell.
    """

    def __init__(self, prog: str | None = None, description: str = "", *, examples: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        if examples:
            kwargs["epilog"] = "examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        super().__init__(prog=prog, description=description, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say `message` in one line, with the nearest option where one is unknown, and exit with code 2."""
        unknown = re.match(r"unrecognized arguments: (.*)", message, re.DOTALL)
        if unknown:
            message = self._explain_unknown(unknown.group(1).split())
        message = re.sub(r"Expected an? <class '(\w+)'>", r"Expected type \1", message).replace("typing.", "")
        sys.stderr.write(f"{self.prog or 'pipeloom'}: error: {one_line(message)}\n")
        raise SystemExit(2)

    def _explain_unknown(self, words: list[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0]).split("=")[0]
        if not word.startswith("-"):
            return f"argument {word!r} is one too many: drop it, or see `{self.prog} --help`"
        options = [option for option in self._all_options() if option.startswith("--")]
        return f"option {word} is unknown: {did_you_mean(word, options) or f'see `{self.prog} --help`'}"

    def _all_options(self) -> Iterable[str]:
        """The options of this parser and of its subcommands."""
        for action in self._actions:
            yield from action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._option_string_actions


def one_line(text: str) -> str:
    """`text` with all its white space folded, so that an error stays one line."""
    return " ".join(str(text).split())


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean X?`` for the name nearest to `word`, None where nothing is near.

    A dotted name is also compared by its last part: ``--layers`` finds ``--model.layers``.
    """
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        by_leaf = {name.lstrip("-").rpartition(".")[2]: name for name in reversed(names)}
        leaf = word.lstrip("-").rpartition(".")[2]
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"did you mean {close[0]}?" if close else None
