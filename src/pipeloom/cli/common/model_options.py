"""The sizes of pipeloom's GPT as options of the commands that measure it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeloom.cli.common.parser import Parser, metavar_of
from pipeloom.errors import InputError
from pipeloom.train.config.sections import ModelConfig
from pipeloom.train.config.train_config import options


def add_model_options(parser: Parser, *, but: Sequence[str] = ()) -> None:
    """Add ``--model.*`` of `pipeloom train`, without the names in `but`; options that are not given are None."""
    group = parser.add_argument_group("model")
    for option in options():
        if option.group == "model" and option.key.removeprefix("model.") not in but:
            text = f"{option.help_with_choices} (default: {option.default_text})"
            metavar = metavar_of(option.kind)
            action = group.add_argument(f"--{option.key}", type=option.kind | None, help=text, metavar=metavar)
            if option.kind is bool:  # the name alone means true
                action.nargs, action.const = "?", True


def given_model(given: dict[str, Any]) -> dict[str, Any]:
    """The sizes on the command line."""
    return {name: value for name, value in given["model"].items() if value is not None}


def whole_model(given: dict[str, Any]) -> dict[str, Any]:
    """All sizes, with the defaults of `pipeloom train`."""
    default = ModelConfig()
    return {name: getattr(default, name) for name in ModelConfig.__dataclass_fields__} | given_model(given)


def check_file_alone(given: dict[str, Any], file: str, others: Sequence[str], content: str) -> None:
    """Validate that model sizes and `others` are not combined with an option whose file has `content`.

    Raises:
        InputError: the first such option.
    """
    given_too = [f"--model.{name}" for name in given_model(given)]
    given_too += [f"--{name.replace('_', '-')}" for name in others if given[name] is not None]
    if given_too:
        raise InputError(f"{given_too[0]} does not work with {file}, whose file has {content}. Remove one of them.")
