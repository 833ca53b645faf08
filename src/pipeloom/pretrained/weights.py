"""`PretrainedWeights`: gives parameters and buffers on the meta device their values, tensor by tensor.

Each tensor of a model from `from_pretrained` knows its name in the model (`NAME`), so that wrappers and cuts around it
do not matter. Of a parameter that is cut inside its stage (`pipeloom.parallel.placed`), its block alone is copied.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.common.quantities import bytes_text
from pipeloom.common.tensor_file import StoredTensor
from pipeloom.errors import InputError
from pipeloom.parallel.placed import placed_block
from pipeloom.pretrained.conversions import Conversion, Conversions
from pipeloom.pretrained.files import mapped
from pipeloom.pretrained.initial_values import initial_values

NAME = "pretrained_name"  # attribute of a tensor: its name in the model
WEIGHTS = "pretrained_weights"  # attribute of a model


class _Use(NamedTuple):
    """A tensor without values in a module: where it is, and the name under which it is in the model."""

    table: dict[str, Tensor | None]
    key: str
    tensor: Tensor
    name: str


class PretrainedWeights:
    """Where the values of a model on the meta device come from.

    Args:
        model: of transformers, on the meta device, without values and without ties.
        stored: the tensors of its files.
        conversions: what makes each tensor.
        device: for the values.
        seed: of parameters that are in no file.
    """

    def __init__(
        self,
        model: nn.Module,
        stored: Mapping[str, StoredTensor],
        conversions: Conversions,
        device: torch.device,
        seed: int,
    ) -> None:
        self.model, self.conversions, self.device = model, conversions, device
        self._stored, self._seed = stored, seed
        self._modules = dict(model.named_modules())

    @torch.no_grad()
    def load(self, modules: Iterable[nn.Module]) -> None:
        """Replace all tensors of some modules that are on the meta device. What the modules share stays shared.

        With device "meta" nothing is read: the model then says what a process would hold.

        Raises:
            InputError: a tensor has no value: it was added to the model on the meta device. Or the process has too
                little memory.
            CheckpointError: a file cannot be read.
        """
        if self.device.type == "meta":
            return
        uses: dict[str, list[_Use]] = {}
        for use in _without_values(modules):
            uses.setdefault(use.name, []).append(use)
        known = {name: conversion for name, conversion in self.conversions.of.items() if name in uses}
        for conversion in sorted({id(each): each for each in known.values()}.values(), key=self._place):
            with self._memory_told(conversion.shapes, uses):
                self._read(conversion, uses)
        initial: dict[str, list[str]] = {}
        for name in uses.keys() - known.keys():
            path, _, key = name.rpartition(".")
            initial.setdefault(path, []).append(key)
        for path in sorted(initial):
            with self._memory_told([f"{path}.{key}" if path else key for key in initial[path]], uses):
                self._initialize(path, initial[path], uses)

    @contextmanager
    def _memory_told(self, names: Iterable[str], uses: Mapping[str, list[_Use]]) -> Iterator[None]:
        """In the block, tensors are read; an error about memory names them, and what this process loads."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not (isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)):
                raise
            read = {id(use.tensor): use for name in names for use in uses.get(name, ())}
            own = {id(use.tensor): use.tensor for found in uses.values() for use in found}
            first = next(iter(read.values()))
            raise InputError(
                f"{first.name!r} of shape {list(first.tensor.shape)} ({bytes_text(first.tensor.nbytes)}): there is no "
                f"memory for it on {self.device}. A process loads its own stages, here "
                f"{bytes_text(sum(tensor.nbytes for tensor in own.values()))}, and one tensor of a file. Use "
                "more ranks, or a smaller dtype=, or give the process more memory."
            ) from error

    def _place(self, conversion: Conversion) -> tuple[str, int]:
        first = self._stored[conversion.parts[0][1]]
        return str(first.path), first.start

    def _read(self, conversion: Conversion, uses: Mapping[str, list[_Use]]) -> None:
        dtype = next(uses[name][0].tensor.dtype for name in conversion.shapes if name in uses)

        def read(key: str) -> Tensor:
            value = mapped(self._stored[key])
            return value if conversion.converter is None else value.to(dtype)

        rows = conversion.rows()
        if rows:
            name = next(iter(conversion.shapes))
            self._put(uses[name], lambda row: rows[row].make(read, self.model)[name][0], by_row=True)
            return
        made = conversion.make(read, self.model)
        for name in [name for name in made if name in uses]:
            self._put_full(uses[name], made.pop(name))

    def _initialize(self, path: str, keys: list[str], uses: Mapping[str, list[_Use]]) -> None:
        dot = f"{path}." if path else ""
        module = self._modules.get(path)
        parameters, buffers = ({}, {}) if module is None else _tables(module)
        missing = {key for key in parameters | buffers if dot + key in self.conversions.missing}
        computed = set() if module is None else buffers.keys() & module._non_persistent_buffers_set
        unknown = next((key for key in keys if key not in missing | computed), None)
        if unknown is not None:
            raise InputError(
                f"{f'{dot}{unknown}'!r} has no value: it is on the meta device, and the {type(self.model).__name__} of "
                "the directory does not have it. Add modules with values, on the CPU."
            )
        found = initial_values(self.model, path, sorted({*keys, *missing, *computed}), self._seed)
        for key in keys:
            self._put_full(uses[dot + key], found[key])

    def _put_full(self, uses: list[_Use], full: Tensor) -> None:
        self._put(uses, lambda _: full, by_row=False)

    def _put(self, uses: list[_Use], values: Callable[[int], Tensor], *, by_row: bool) -> None:
        """Put values where tensors have none: of a tensor that is cut, those of this process's block.

        Args:
            uses: of one tensor of the model, or of its blocks.
            values: returns a row of the full tensor or, without `by_row`, all of it.
            by_row: whether only the rows that are needed are made, one after another.
        """
        made: dict[int, Tensor] = {}
        for use in uses:
            if id(use.tensor) not in made:
                value, block = torch.empty_like(use.tensor, device=self.device), placed_block(use.tensor)
                if block is not None and block.how.padded:
                    value.zero_()
                whole = tuple(slice(0, size) for size in value.shape)
                pieces = [(whole, whole, True)] if block is None else block.how.pieces(block.place)
                for there, here, _ in pieces:
                    if not by_row:
                        value[here].copy_(values(0)[there])
                        continue
                    for row in range(there[0].start, there[0].stop):
                        place = (here[0].start + row - there[0].start, *here[1:])
                        value[place].copy_(values(row)[there[1:]])
                made[id(use.tensor)] = _like(use.tensor, value)
            use.table[use.key] = made[id(use.tensor)]


def _tables(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The parameters and the buffers of a module itself."""
    parameters, buffers = (
        {key: tensor for key, tensor in table.items() if tensor is not None}
        for table in (module._parameters, module._buffers)
    )
    return parameters, buffers


def _without_values(modules: Iterable[nn.Module]) -> Iterator[_Use]:
    seen: set[int] = set()
    for module in modules:
        for path, part in module.named_modules():
            if id(part) in seen:
                continue
            seen.add(id(part))
            tables: tuple[Any, Any] = (part._parameters, part._buffers)
            for table in tables:
                for key, tensor in list(table.items()):
                    if tensor is not None and tensor.is_meta:
                        name = getattr(tensor, NAME, f"{path}.{key}" if path else key)
                        yield _Use(table, key, tensor, name)


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    """A parameter, which stays the same object, or a buffer with this value; a parameter keeps attributes and hooks."""
    if not isinstance(tensor, nn.Parameter):
        return value
    made = nn.Parameter(value, tensor.requires_grad)
    vars(made).update(vars(tensor))
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, kind, None)
        if hooks:
            setattr(made, kind, OrderedDict(hooks))
    try:
        swap: Any = torch.utils.swap_tensors
        swap(tensor, made)  # an optimizer may hold the parameter already
    except RuntimeError:  # a weak reference, or another hold, forbids it
        return made
    return tensor
