"""From tensors of a model to those that transformers saves: `conversions` backwards."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeloom.pretrained.conversions import Conversion

Form = tuple[tuple[int, ...], torch.dtype]  # the shape and dtype of a tensor


class Saved(NamedTuple):
    """Tensors of a model that are saved together, and what they become.

    Attributes:
        names: of the tensors of the model.
        forms: of the saved tensors, by name.
        make: returns the saved tensors for those of the model.
    """

    names: tuple[str, ...]
    forms: dict[str, Form]
    make: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def unchanged(forms: Mapping[str, Form]) -> list[Saved]:
    """The tensors under their own names, with their own values."""
    return [Saved((name,), {name: form}, dict) for name, form in forms.items()]


def reversed_conversions(model: Any, forms: Mapping[str, Form]) -> list[Saved]:
    """How the tensors of a model of transformers are saved, in the order of `forms`.

    The rules are those by which it was loaded or, for another model, those of its class.

    Args:
        model: with or without values.
        forms: of all its full tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        PrefixChange,
        WeightConverter,
        WeightRenaming,
        apply_converters,
        apply_renamings,
    )

    rules = getattr(model, "_weight_conversions", None)
    if rules is None:  # a prefix that was not there on loading is not added
        own = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in own if not isinstance(rule, PrefixChange)]
    back = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in back if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in back if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, Conversion] = {}
    for name in forms:
        key, pattern = apply_converters(name, converters)
        if pattern is None:
            key = apply_renamings(name, renamings)
        conversion = found.setdefault(key, Conversion(key, None if pattern is None else by_pattern[pattern]))
        conversion.parts.append((pattern or name, name))
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in forms.items()}
    # What transformers' operations ask a model: its configuration, and the shapes of full parameters.
    shapes = SimpleNamespace(config=model.config, get_parameter=empty.__getitem__)
    return [_saved(each, shapes, empty, lambda name: apply_renamings(name, renamings)) for each in found.values()]


def _saved(conversion: Conversion, model: Any, empty: Mapping[str, Tensor], rename: Callable[[str], str]) -> Saved:
    def make(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        made = conversion.make(values.__getitem__, model)
        return made if conversion.converter is None else {rename(key): value for key, value in made.items()}

    forms = {key: (tuple(value.shape), value.dtype) for key, value in make(empty).items()}
    return Saved(tuple(name for _, name in conversion.parts), forms, make)
