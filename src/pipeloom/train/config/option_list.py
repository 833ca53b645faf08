"""`options`: every option of `pipeloom train`, from the dataclasses of its configuration. No torch."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from pipeloom.train.config.train_config import TrainConfig


class Option(NamedTuple):
    """One option: its dotted key, type, default and help, and the group of the help that shows it.

    `default_text` is the default as the help says it, `value` how it names the value where its type does not.
    """

    key: str
    kind: Any
    default: Any
    help: str
    group: str
    default_text: str
    value: str | None

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the option takes; empty where it takes others too."""
        kinds = (self.kind, *get_args(self.kind))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def help_with_choices(self) -> str:
        return f"{self.help}: {', '.join(self.choices)}" if self.choices else self.help


def options(kind: Any = TrainConfig, section: str = "") -> Iterator[Option]:
    """Every option of a dataclass, which is `section`, and of the sections in it, in order of declaration."""
    hints = get_type_hints(kind)
    for entry in dataclasses.fields(kind):
        hint = hints[entry.name]
        if entry.default is None and type(None) not in get_args(hint):
            hint = hint | None
        if dataclasses.is_dataclass(hint):
            yield from options(hint, entry.name)
            continue
        key = f"{section}.{entry.name}" if section else entry.name
        text, unset = entry.metadata["help"], entry.metadata["unset"]
        shown = json.dumps(entry.default).strip('"') if isinstance(entry.default, bool | str) else str(entry.default)
        group, value = section or entry.metadata["group"], entry.metadata["value"]
        yield Option(key, hint, entry.default, text, group, unset or shown, value)
