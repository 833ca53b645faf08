"""The argument parser of every command: errors are one line, with the nearest right name, and exit code 2."""

import argparse
import difflib
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NoReturn, get_args, get_origin

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import register_type

from pipeloom.common.quantities import Bytes, BytesPerSecond
from pipeloom.errors import unwrapped

_RULES = {
    int: "must be an integer",
    float: "must be a finite number",
    bool: "must be true or false",
    Bytes: "must be a size in bytes, such as 8e9, 16GB or 16GiB",
    BytesPerSecond: "must be a bandwidth in bytes per second, such as 1.25e9, 12GB or 100MiB",
}
_METAVARS = {int: "N", float: "X", bool: "BOOL", Bytes: "BYTES", BytesPerSecond: "RATE"}
_NAME_COLUMNS = 44  # of an option and its value in the help
_MOST_LETTERS = 24  # of choices that the help shows as the value
_WIDE_COLUMNS = 116  # of a terminal; in a narrower one, descriptions are below the names
_GIVEN = "alue: "  # errors of jsonargparse end with this and the given value
register_type(Bytes, serializer=lambda size: Bytes(size).written, deserializer=lambda given: _parsed(Bytes, given))
register_type(BytesPerSecond, serializer=float, deserializer=lambda given: _parsed(BytesPerSecond, given))


def _parsed(kind: Any, given: object) -> Any:
    try:
        return kind.parse(given)
    except ValueError as error:
        raise ValueError(f"Got value: {given}") from error


class _HelpFormatter(DefaultHelpFormatter):
    """One line for each option, with its default; environment variables are explained once, not with each option."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns
        position = _NAME_COLUMNS if columns >= _WIDE_COLUMNS else 6
        super().__init__(prog, max_help_position=position, width=columns - 2)  # type: ignore[no-untyped-call]

    def add_usage(self, usage: str | None, actions: Iterable[argparse.Action], *more: Any, **options: Any) -> None:
        """Required arguments by name, all others as ``[options]``."""
        needed = [action for action in actions if action.required or not action.option_strings]
        words = [" ".join([*action.option_strings[:1], self._value_of(action)]) for action in needed]
        super().add_usage(usage or " ".join([self._prog, *words, "[options]"]), actions, *more, **options)

    def _value_of(self, action: argparse.Action) -> str:
        if action.nargs == 0:
            return ""
        if action.metavar or not action.option_strings:
            return str(action.metavar or action.dest.upper())
        choices = "|".join(map(str, action.choices or ()))
        return choices if 0 < len(choices) <= _MOST_LETTERS else metavar_of(getattr(action, "_typehint", None))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return f"{', '.join(action.option_strings)} {self._value_of(action)}".strip()

    def _get_help_string(self, action: argparse.Action) -> str:
        shown = action.help or ""
        if action.choices and self._value_of(action) == "NAME":
            shown += f": {', '.join(map(str, action.choices))}"
        if action.required and action.option_strings:
            return f"{shown} (required)"
        known = action.default not in (None, False, argparse.SUPPRESS) and action.option_strings
        return f"{shown} (default: {action.default})" if known and not shown.endswith(")") else shown

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are wrapped; examples keep their lines."""
        if text.startswith("examples:"):
            return text
        return "\n\n".join(textwrap.fill(paragraph, width) for paragraph in text.split("\n\n"))


class Parser(ArgumentParser):
    """jsonargparse's parser with errors of one line on stderr and exit code 2.

    An unknown option is reported with the nearest known one. Abbreviated options and empty values are errors; so a
    script keeps its meaning when options are added.

    Args:
        prog: the command as typed, such as ``pipeloom simulate``.
        description: one paragraph.
        examples: lines that can be pasted into a shell.
    """

    may_be_empty: frozenset[str] = frozenset()  # options that mean something when empty
    place: str = ""  # source of the values, if not the command line

    def __init__(self, prog: str | None = None, description: str = "", *, examples: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        if examples:
            kwargs["epilog"] = "examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        super().__init__(prog=prog, description=description, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print `message` in one line, with the nearest option for an unknown one, and exit with code 2."""
        sys.stderr.write(f"{self.prog or 'pipeloom'}: error: {unwrapped(self._explain(unwrapped(str(message)), ex))}\n")
        raise SystemExit(2)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:  # type: ignore[override]
        """Parse arguments as jsonargparse does; an empty value is an error, except for options in `may_be_empty`."""
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip([None, *words], words, strict=False):
            name, equals, value = word.partition("=")
            option = name if equals and name.startswith("--") else before
            if (not word or (equals and not value and option == name)) and option not in self.may_be_empty:
                what = f"option {option}" if option and option.startswith("--") else "an argument"
                self.error(f"{what} has an empty value. Give a value, or remove it.")
        return super().parse_args(words, *more, **options)

    def _explain(self, message: str, error: Exception | None) -> str:
        """Name, value, rule and fix; jsonargparse itself names Python types and lists every alternative."""
        if isinstance(error, argparse.ArgumentError) and error.argument_name is not None:
            name = error.argument_name.split("/")[0]
            return f"option {name} needs a value." if "expected one" in error.message else f"{name}: {error.message}"
        head, _, rest = message.partition(": ")
        if head == "unrecognized arguments":
            return self._explain_unknown(rest.split())
        if head == "the following arguments are required":
            known = self._option_names()
            missing = [f"--{name}" if f"--{name}" in known else f"argument {name}" for name in rest.split(", ")]
            return f"{', '.join(missing)} {'are' if missing[1:] else 'is'} missing. See `{self.prog} --help`."
        if head.startswith("Parser key"):
            return self._explain_value(head.split('"')[1], message.rpartition(_GIVEN)[2])
        return message

    def _explain_value(self, key: str, value: str) -> str:
        action = next(each for each in self._actions if each.dest == key)
        kind = _without_none(getattr(action, "_typehint", None))
        name = key if self.place else "/".join(action.option_strings) or key
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        rule = f"must be one of {', '.join(map(str, choices))}" if choices else _RULES.get(kind, "is of the wrong type")
        try:  # 1e3 is a float in YAML
            hint = f" Write {int(float(value))}." if kind is int and float(value).is_integer() else ""
        except ValueError:
            hint = ""
        return f"{self.place}{name}={value}: {rule}.{hint}"

    def _explain_unknown(self, words: list[str]) -> str:
        word = next((word for word in words if word.startswith("-")), words[0]).split("=")[0]
        if not word.startswith("-"):
            return f"argument {word!r} is unexpected. Remove it, or see `{self.prog} --help`."
        options = [option for option in self._option_names() if option.startswith("--")]
        return f"option {word} is unknown: {did_you_mean(word, options) or f'see `{self.prog} --help`'}"

    def _option_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def metavar_of(kind: Any) -> str:
    """The name of a value of this type in the help."""
    if kind is None or get_origin(_without_none(kind)) is Literal:  # None: of choices
        return "NAME"
    return _METAVARS.get(_without_none(kind), "TEXT")


def _without_none(kind: Any) -> Any:
    others = [each for each in get_args(kind) if each is not type(None)]
    return others[0] if len(others) == 1 and type(None) in get_args(kind) else kind


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``did you mean X?`` for the name nearest to `word`, or None.

    A dotted name is also compared by its last part: ``--layers`` finds ``--model.layers``.
    """
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:
        by_leaf = {name.lstrip("-").rpartition(".")[2]: name for name in reversed(names)}
        leaf = word.lstrip("-").rpartition(".")[2]
        close = [by_leaf[match] for match in difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)]
    return f"did you mean {close[0]}?" if close else None
