"""From tensors of files to tensors of a model: renamed, fused or taken apart as transformers does on loading.

    files                                             model
    bert.encoder.layer.0.attention...                 encoder.layer.0.attention...            a base model from a head's
    model.layers.0.mlp.experts.0.gate_proj.weight  \\
    model.layers.0.mlp.experts.0.up_proj.weight     > model.layers.0.mlp.experts.gate_up_proj
    model.layers.0.mlp.experts.1.gate_proj.weight  /

The rules are those of transformers (`conversion_mapping`, `core_model_loading`). Shapes are found on the meta device,
before anything is read.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.common.tensor_file import StoredTensor
from pipeloom.errors import CheckpointError, one_line
from pipeloom.pretrained.files import TORCH_TYPES


@dataclass
class Conversion:
    """Tensors of files that together make one or several tensors of a model.

    Attributes:
        first: the first tensor of the model that it makes.
        converter: of transformers; None: the tensor stays as it is.
        parts: the tensors of files, each with the pattern of the converter that it fits.
        shapes: the shapes of what it makes, by name.
    """

    first: str
    converter: Any = None
    parts: list[tuple[str, str]] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)

    def make(self, tensor: Callable[[str], Tensor], model: Any) -> dict[str, Tensor]:
        """The tensors of the model.

        Args:
            tensor: returns a tensor of the files.
            model: has the configuration and the shapes of the model.
        """
        if self.converter is None:
            return {self.first: tensor(self.parts[0][1])}
        converter = copy.deepcopy(self.converter)
        for pattern, key in self.parts:
            converter.add_tensor(self.first, key, pattern, tensor(key))
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def rows(self) -> list["Conversion"]:
        """What makes each row of a stack along dimension 0, such as of experts; empty: it makes no such stack."""
        if self.converter is None or len(self.shapes) != 1 or not _stacks_rows(self.converter.operations):
            return []
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, key in self.parts:
            by_pattern.setdefault(pattern, []).append((pattern, key))
        number = next(iter(self.shapes.values()))[0]
        if any(len(parts) != number for parts in by_pattern.values()):
            return []
        return [Conversion(self.first, self.converter, list(parts)) for parts in zip(*by_pattern.values(), strict=True)]


def _stacks_rows(operations: Sequence[Any]) -> bool:
    """Whether operations of transformers stack tensors along dimension 0, and then work on each row by itself."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    first, *others = operations
    return (type(first) is MergeModulelist and first.dim == 0) and all(
        (type(each) is Concatenate and each.dim > 0)
        or (type(each) is Transpose and not each.check_dims and min(each.dim0, each.dim1) > 0)
        for each in others
    )


@dataclass
class Conversions:
    """How the files of a directory make a model.

    Attributes:
        of: by name in the model, what makes the tensor.
        missing: tensors of the model that are in no file.
        unexpected: tensors of files that the model does not have.
        used: the rules of transformers that were used; saving reverses them.
    """

    of: dict[str, Conversion]
    missing: set[str]
    unexpected: set[str]
    used: list[Any]


def find_conversions(model: Any, stored: Mapping[str, StoredTensor]) -> Conversions:
    """Find what makes each tensor of a model of transformers on the meta device.

    Raises:
        CheckpointError: tensors do not fit the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    own, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Conversion] = {}
    unexpected: set[str] = set()
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, own)
        if name not in own and key in own:
            name, pattern = rename_source_key(key, [], [], prefix, own)
        if name not in own:
            unexpected.add(name if pattern is None else key)
            continue
        rule = None if pattern is None else by_pattern[pattern]
        conversion = found.setdefault(name, Conversion(name, rule))
        conversion.parts.append((pattern or key, key))
    of: dict[str, Conversion] = {}
    for conversion in found.values():
        for name, shape in _shapes(conversion, model, stored).items():
            if name not in own:
                unexpected.add(name)
                continue
            if own[name].shape != shape:
                raise CheckpointError(
                    f"{name} has shape {list(shape)} in {stored[conversion.parts[0][1]].path} and "
                    f"{list(own[name].shape)} in {type(model).__name__}. Use the configuration of the directory, or "
                    "another one."
                )
            of[name] = conversion
            conversion.shapes[name] = shape
    return Conversions(of, own.keys() - of.keys(), unexpected, [rule for rule in rules if rule.was_used()])


def _shapes(conversion: Conversion, model: nn.Module, stored: Mapping[str, StoredTensor]) -> dict[str, torch.Size]:
    """The shapes of what a conversion makes."""

    def on_meta(key: str) -> Tensor:
        return torch.empty(stored[key].shape, dtype=TORCH_TYPES[stored[key].dtype], device="meta")

    try:
        return {name: value.shape for name, value in conversion.make(on_meta, model).items()}
    except Exception as error:  # of transformers' operations
        raise CheckpointError(
            f"{conversion.first}: transformers' conversion of {conversion.parts[0][1]} and "
            f"{len(conversion.parts) - 1} other tensors failed ({one_line(error)}). Load and save the directory once "
            "with transformers."
        ) from error
