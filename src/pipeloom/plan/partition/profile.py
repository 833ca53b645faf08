"""What each layer of a model takes and holds, for one minibatch: a JSON file.

    {"version": 1,
     "layers": [{"name": "embedding", "forward_seconds": 0.001, "backward_seconds": 0.002,
                 "activation_bytes": 1048576, "parameter_bytes": 786432}, ...]}

`activation_bytes` are those of the layer's output, which is what a stage that ends there sends; the gradient that comes
back has as many. `parameter_bytes` are the weights alone. `version` may be left out.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from pipeloom.errors import InputError
from pipeloom.ir.json_text import load_json

_VERSION = 1
MOST = 1e100  # of any number: products of two are finite


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """One layer on one minibatch.

    Attributes:
        name: for people.
        forward_seconds: of the forward.
        backward_seconds: of the whole backward, of inputs and weights.
        activation_bytes: of the output.
        parameter_bytes: of the weights.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    activation_bytes: float
    parameter_bytes: float


_KEYS = tuple(field.name for field in fields(LayerProfile))


@dataclass(frozen=True, slots=True)
class Profile:
    """The layers of a model in the order in which they run.

    Raises:
        InputError: there are none, or a number is negative or not finite.
    """

    layers: tuple[LayerProfile, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise InputError("the profile has no layers: a model has one at least; profile it again")
        for number, layer in enumerate(self.layers):
            for key in _KEYS[1:]:
                _check_number(f"{key} of layer {number} of the profile", getattr(layer, key))
        for key in _KEYS[1:]:
            total = sum(float(getattr(layer, key)) for layer in self.layers)
            if total > MOST:
                raise InputError(f"{key} of the profile add up to {total:g}: the most is {MOST:g}; correct the units")

    @classmethod
    def of(cls, rows: Iterable[tuple[str, float, float, float, float]]) -> Profile:
        """From rows in the order of `LayerProfile`."""
        return cls(tuple(LayerProfile(*row) for row in rows))

    def to_json(self) -> str:
        """The text of a profile file; `parse_profile` reads it back exactly."""
        return json.dumps({"version": _VERSION, "layers": [asdict(layer) for layer in self.layers]}, indent=1)


def parse_profile(text: str) -> Profile:
    """Read the JSON of a profile file.

    Raises:
        InputError: it is not one; the message names the layer, the key and the rule.
    """
    form = f'{{"layers": [{{"{_KEYS[0]}": ..., {", ".join(f"{key!r}: ..." for key in _KEYS[1:])}}}, ...]}}'
    form = form.replace("'", '"')
    try:
        data = load_json(text)
    except ValueError as error:
        raise InputError(f"the profile is no JSON ({error}): write {form}") from error
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
        raise InputError(f"the profile has no list of layers: write {form}")
    unknown = sorted(set(data) - {"version", "layers"})
    if unknown:
        raise InputError(f"the profile has a key {reprlib.repr(unknown[0])}: its keys are version and layers; drop it")
    version = data.get("version", _VERSION)
    if isinstance(version, bool) or version != _VERSION:
        raise InputError(
            f"the profile is of version {reprlib.repr(version)}: this pipeloom reads {_VERSION}; profile the model anew"
        )
    return Profile(tuple(_layer(number, entry) for number, entry in enumerate(data["layers"])))


def _layer(number: int, entry: Any) -> LayerProfile:
    if not isinstance(entry, dict):
        raise InputError(f"layer {number} of the profile is no object: its keys are {', '.join(_KEYS)}; write them")
    odd = sorted(set(entry) ^ set(_KEYS), key=lambda key: (key not in _KEYS, key))
    if odd:
        fix = (
            "lacks the key {}: its keys are {}; add it" if odd[0] in _KEYS else "has a key {}: its keys are {}; drop it"
        )
        raise InputError(f"layer {number} of the profile {fix.format(reprlib.repr(odd[0]), ', '.join(_KEYS))}")
    if not isinstance(entry["name"], str):
        raise InputError(
            f"the name of layer {number} of the profile is {reprlib.repr(entry['name'])}: a name is text; quote it"
        )
    return LayerProfile(**entry)


def _check_number(what: str, value: Any) -> None:
    good = not isinstance(value, bool) and isinstance(value, int | float)
    try:
        good = good and math.isfinite(float(value)) and value >= 0
    except OverflowError:
        good = False
    if not good:
        raise InputError(f"{what} is {reprlib.repr(value)}: it is a finite number, 0 or more; correct it")
