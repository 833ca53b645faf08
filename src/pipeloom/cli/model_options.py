"""The sizes of a GPT as options of commands that measure or count one, unless a file says what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeloom.cli.parser import Parser, metavar_of
from pipeloom.errors import InputError
from pipeloom.train.config.sections import ModelConfig
from pipeloom.train.config.train_config import options


def add_model_options(parser: Parser, *, but: Sequence[str] = ()) -> None:
    """Add ``--model.*`` of `pipeloom train`, without those named in `but`; what is left out is None."""
    group = parser.add_argument_group("model")
    for option in options():
        if option.group == "model" and option.key.removeprefix("model.") not in but:
            text = f"{option.help_with_choices} (default: {option.default_text})"
            metavar = metavar_of(option.kind)
            action = group.add_argument(f"--{option.key}", type=option.kind | None, help=text, metavar=metavar)
            if option.kind is bool:  # the name alone means true
                action.nargs, action.const = "?", True


def given_model(given: dict[str, Any]) -> dict[str, Any]:
    """The sizes that were given."""
    return {name: value for name, value in given["model"].items() if value is not None}


def whole_model(given: dict[str, Any]) -> dict[str, Any]:
    """All sizes; those that were not given are what `pipeloom train` has."""
    default = ModelConfig()
    return {name: getattr(default, name) for name in ModelConfig.__dataclass_fields__} | given_model(given)


def check_file_alone(given: dict[str, Any], file: str, others: Sequence[str], says: str) -> None:
    """Refuse sizes of a model, and `others`, beside an option that names a file which `says` the same.

    Raises:
        InputError: the first of them.
    """
    beside = [f"--model.{name}" for name in given_model(given)]
    beside += [f"--{name.replace('_', '-')}" for name in others if given[name] is not None]
    if beside:
        raise InputError(f"{beside[0]} beside {file}: the file says {says}; drop one of the two")
