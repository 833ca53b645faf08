"""The argument parser of every command: errors are one line, with the nearest right name, and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from jsonargparse.typing import register_type

from pipeloom.common.quantities import Bytes, BytesPerSecond
from pipeloom.errors import unwrapped

_KINDS = {
    "int": "a whole number",
    "float": "a finite number",
    "bool": "true or false",
    "str": "text",
    "Bytes": "bytes, such as 8e9, 16GB or 16GiB",
    "BytesPerSecond": "bytes a second, such as 1.25e9, 12GB or 100MiB",
}
register_type(Bytes, serializer=lambda size: Bytes(size).written, deserializer=Bytes.parse)
register_type(BytesPerSecond, serializer=float, deserializer=BytesPerSecond.parse)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter, DefaultHelpFormatter):
    """Types and defaults in the help; descriptions and examples keep their line breaks."""


class Parser(ArgumentParser):
    """jsonargparse's parser, with errors for people.

    A mistyped option is answered with the nearest right one. Every error is one line on stderr, exit code 2.
    Abbreviated options are refused, so that a script keeps its meaning when options are added. So are empty values.

    Args:
        prog: the command as typed, such as ``pipeloom simulate``.
        description: one paragraph.
        examples: lines that can be pasted into a shell.
    """

    may_be_empty: frozenset[str] = frozenset()  # options that mean something when empty

    def __init__(self, prog: str | None = None, description: str = "", *, examples: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        if examples:
            kwargs["epilog"] = "examples:\n" + "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
        super().__init__(prog=prog, description=description, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Say `message` in one line, with the nearest option where one is unknown, and exit with code 2."""
        sys.stderr.write(f"{self.prog or 'pipeloom'}: error: {unwrapped(self._explain(unwrapped(str(message))))}\n")
        raise SystemExit(2)

    def parse_args(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:  # type: ignore[override]
        """As jsonargparse's; a value that is there but empty is refused, unless the option is in `may_be_empty`."""
        words = list(sys.argv[1:] if args is None else args)
        for before, word in zip([None, *words], words, strict=False):
            name, equals, value = word.partition("=")
            option = name if equals and name.startswith("--") else before
            if (not word or (equals and not value and option == name)) and option not in self.may_be_empty:
                what = f"option {option}" if option and option.startswith("--") else "an argument"
                self.error(f"{what} has an empty value: give one, or leave it out")
        return super().parse_args(words, *more, **options)

    def _explain(self, message: str) -> str:
        """What was seen, the rule and the fix, in place of jsonargparse's words."""
        if found := re.match(r"unrecognized arguments: (.*)", message):
            return self._explain_unknown(found.group(1).split())
        if found := re.match(r"the following arguments are required: (.*)", message):
            known = set(self._all_options())
            missing = ", ".join(
                f"--{name}" if f"--{name}" in known else f"argument {name}" for name in found[1].split(", ")
            )
            return (
                f"{missing} {'are' if ',' in missing else 'is'} missing: the command needs it; see `{self.prog} --help`"
            )
        if found := re.match(r"argument (--\S+?)(?:/\S+)?: expected one argument", message):
            return f"option {found[1]} has no value: it needs one; give it"
        if found := (
            re.match(r'Parser key "([^"]+)": (.*) (?:Got value|Given value): (.*)$', message)
            or re.match(r'Parser key "([^"]+)": (Not of type \w+): (.*) is not a number', message)
        ):
            key, text, value = found.groups()
            choices = re.search(r"Literal\[([^]]*)\]", text)
            kinds = [
                _KINDS[name] for name in re.findall(rf"\b({'|'.join(_KINDS)})\b", text) if name != "str" or not choices
            ]
            kind = f"one of {choices[1]}" if choices else " or ".join(dict.fromkeys(kinds[:1])) or "of another kind"
            hint = _nearest_number(value, kind)
            return f"{key} is {value}: it must be {kind}; {hint or 'correct it'}"
        return message

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


def _nearest_number(value: str, kind: str) -> str | None:
    """How to write what was probably meant: 1e3 is no whole number in YAML."""
    try:
        return f"write {int(float(value))}" if kind == "a whole number" and float(value).is_integer() else None
    except ValueError:
        return None


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
