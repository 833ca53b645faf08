"""Values that cross a stage boundary: tensors, constants, and tuples, lists and dicts of them.

A value is flattened to its tensors and a `Layout`. The layout travels with every message, so that shapes, dtypes and
structure may change from one micro-batch to the next. On the wire the layout is JSON; nothing is ever unpickled.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pipeloom.common.division import even_parts
from pipeloom.errors import InputError, listed

Value = Any  # Tensor | tuple | list | dict[str | int, Value] | int | float | bool | str | None
_TENSOR = "t"  # the structure of a single tensor, by far the most frequent value
_OVERLAPS = "overlaps"  # begins a structure with `Layout.overlapping`; these positions and the structure follow
_SAME = "same"  # begins the structure of a tensor that came before in the value; its position follows
_NESTED = (tuple, list, dict)
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class Layout:
    """Structure, shapes and dtypes of a value.

    Attributes:
        structure: JSON of the nesting (see `_strip`), with ``"t"`` where a tensor stands for the first time.
        specs: shape, dtype and "wants a gradient" of each tensor, in order of traversal.
        header: the same as bytes, for the wire.
        offsets: where each tensor starts in a message's payload, aligned to 64 bytes.
        num_bytes: the length of the payload.
        overlapping: positions of tensors that had memory in common with others where they were sent.
    """

    structure: str
    specs: tuple[tuple[torch.Size, torch.dtype, bool], ...]
    header: bytes
    offsets: tuple[int, ...]
    num_bytes: int
    overlapping: tuple[int, ...]


@lru_cache(maxsize=4096)
def _layout(structure: str, specs: tuple[tuple[torch.Size, torch.dtype, bool], ...]) -> Layout:
    offsets, end = [], 0
    for shape, dtype, _ in specs:
        offsets.append(end)
        end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    tensors = [[list(shape), str(dtype).removeprefix("torch."), wants] for shape, dtype, wants in specs]
    header = json.dumps([structure, tensors], separators=(",", ":")).encode()
    overlapping = tuple(json.loads(structure)[1]) if structure.startswith(f'["{_OVERLAPS}"') else ()
    return Layout(structure, specs, header, tuple(offsets), end, overlapping)


@lru_cache(maxsize=4096)
def decode(header: bytes) -> Layout:
    """The layout with this `Layout.header`."""
    structure, tensors = json.loads(header)
    specs = tuple((torch.Size(shape), getattr(torch, dtype), wants) for shape, dtype, wants in tensors)
    return _layout(structure, specs)


@lru_cache(maxsize=4096)
def layout_of_some(layout: Layout, chosen: bytes) -> tuple[Layout, Layout]:
    """Layouts of the tensors whose byte in `chosen` is 0, and of the others; both begin at offset 0."""
    specs = list(zip(layout.specs, chosen, strict=True))
    one, other = (_layout("", tuple(spec for spec, byte in specs if bool(byte) is side)) for side in (False, True))
    return one, other


def flatten(value: Value, what: str = "a stage returned", *, repeated: bool = False) -> tuple[Layout, list[Tensor]]:
    """Split a value into its layout and its tensors; the inverse of `unflatten`.

    A tensor that occurs several times is listed once, and `unflatten` puts one tensor in all its places: a change in
    place is seen in all of them. `repeated` lists it each time. `unflatten` makes a plain tuple, list or dict of an
    instance of a subclass, except of PackedSequence. `what` begins an error.

    Raises:
        InputError: the value holds something other than dense tensors, constants, tuples, lists and dicts.
    """
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        return _layout(_TENSOR, ((value.shape, value.dtype, value.requires_grad),)), [value]
    tensors: list[Tensor] = []
    try:
        structure = _encoded(_strip(value, tensors, None if repeated else {}, what))
    except RecursionError:
        raise InputError(f"{what} a value that contains itself. Take it out.") from None
    return _layout(structure, tuple((t.shape, t.dtype, t.requires_grad) for t in tensors)), tensors


def with_overlapping(layout: Layout, positions: Sequence[int]) -> Layout:
    """The layout with these positions as `Layout.overlapping`."""
    structure = _TENSOR if layout.structure == _TENSOR else _decoded(layout.structure)
    return _layout(json.dumps([_OVERLAPS, list(positions), structure]), layout.specs)


def tensors_in(value: Value) -> list[Tensor]:
    """The tensors of a value, in the order of `flatten`: each once."""
    if isinstance(value, Tensor):
        return [value]
    found: dict[int, Tensor] = {}
    _collect(value, found)
    return list(found.values())


def _collect(value: Value, found: dict[int, Tensor]) -> None:
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, _NESTED) else ():
        if isinstance(item, Tensor):
            found.setdefault(id(item), item)
        elif isinstance(item, _NESTED):
            _collect(item, found)


def unflatten(layout: Layout, tensors: Sequence[Tensor]) -> Value:
    """The value with this layout and these tensors."""
    if layout.structure == _TENSOR:
        return tensors[0]
    return _fill(_decoded(layout.structure), tensors, iter(tensors))


def with_form(value: Value, like: Value) -> Value:
    """A dict as an instance of the class of `like`, such as an output of transformers; any other value unchanged."""
    if type(value) is not dict or type(like) is dict or not isinstance(like, dict):
        return value
    kind: Any = type(like)
    return kind(**value)


def copied(value: Value) -> Value:
    """The value with a copy of each of its tensors; a tensor that occurs several times still does."""
    layout, tensors = flatten(value)
    return unflatten(layout, [tensor.clone() for tensor in tensors])


_encoded = lru_cache(maxsize=4096)(json.dumps)  # a structure of `_strip`
_decoded = lru_cache(maxsize=4096)(json.loads)


def _strip(value: Value, tensors: list[Tensor], places: dict[int, int] | None, what: str) -> Any:
    """The nesting as tuples, which are hashable; constants carry their type, since 1, 1.0 and True are equal.

    Fills `tensors`, and `places` with the position in it by id of a tensor; None: each occurrence counts.
    """
    kind = type(value).__name__
    if isinstance(value, Tensor):
        if value.layout is torch.strided and not value.is_nested:
            if places is not None and places.setdefault(id(value), len(tensors)) < len(tensors):
                return _SAME, places[id(value)]
            tensors.append(value)
            return _TENSOR
        kind = "nested tensor" if value.is_nested else f"{value.layout} tensor"
    elif isinstance(value, tuple | list):  # a subclass would have to be imported by name on the other side
        items = tuple([_strip(item, tensors, places, what) for item in value])
        if isinstance(value, PackedSequence):
            return "packed", items
        return "tuple" if isinstance(value, tuple) else "list", items
    elif isinstance(value, dict) and all(isinstance(key, str | int) for key in value):
        pairs = [(type(key).__name__, key, _strip(item, tensors, places, what)) for key, item in value.items()]
        return "dict", tuple(pairs)
    elif isinstance(value, float):  # as text, for 0.0 and -0.0 are equal
        return "float", repr(float(value))
    elif value is None or isinstance(value, bool | int | str):
        return "constant", kind, value
    if isinstance(value, dict):
        key = next(key for key in value if not isinstance(key, str | int))
        raise InputError(f"{what} a dict with key {key!r}: keys must be str or int. Rename the key.")
    fix = "with list(x) or dict(x), for example"
    if isinstance(value, Tensor):
        fix = "to a dense tensor"
    elif hasattr(value, "__array__"):
        fix = "with torch.from_numpy(x)" if kind == "ndarray" else "to a tensor"
    elif is_dataclass(value):
        fix = "with vars(x), or take its tensors"
    raise InputError(
        f"{what} a value of type {kind}: must be dense tensors, None, bool, int, float or str, or tuples, lists and "
        f"dicts of these. Convert it {fix}."
    )


def _fill(structure: Any, tensors: Sequence[Tensor], coming: Iterator[Tensor]) -> Value:
    if structure == _TENSOR:
        return next(coming)
    kind, *content = structure
    if kind == _SAME:
        return tensors[content[0]]
    if kind == _OVERLAPS:
        return _fill(content[1], tensors, coming)
    if kind == "constant":
        return content[-1]
    if kind == "float":
        return float(content[0])
    if kind == "dict":
        return {key: _fill(item, tensors, coming) for _, key, item in content[0]}
    items = [_fill(item, tensors, coming) for item in content[0]]
    if kind == "packed":
        return PackedSequence(*items)
    return items if kind == "list" else tuple(items)


def _holds_packed(layout: Layout) -> bool:
    return '["packed", ' in layout.structure


class MicroBatches(list[Any]):
    """A batch that is cut into micro-batches already, such as of sequences of different lengths: a value for each.

    Auxiliary losses of the model are weighted as if the samples were divided evenly.
    """


def sizes_of(batches: MicroBatches, num_microbatches: int, what: str) -> list[int]:
    """The number of samples in each micro-batch: the length of its first tensor.

    Raises:
        InputError: there is another number of micro-batches, or one without samples.
    """
    if len(batches) != num_microbatches:
        raise InputError(
            f"{what} are cut into {len(batches)} micro-batches: the schedule has {num_microbatches}. Pass as many."
        )
    sizes = [next((t.shape[0] for t in flatten(each, f"{what} hold")[1] if t.dim()), 0) for each in batches]
    if 0 in sizes:
        raise InputError(f"{what} have no samples in micro-batch {sizes.index(0)}: each needs at least one.")
    return sizes


def split_batch(value: Value, num_microbatches: int, what: str) -> tuple[list[Value], list[int]]:
    """Split a batch along dimension 0 of all its tensors into micro-batches; sizes differ by at most one sample.

    Returns:
        The micro-batches and the number of samples in each.

    Raises:
        InputError: the batch has no tensor, tensors of different length, or fewer samples than micro-batches.
    """
    layout, tensors = flatten(value, f"{what} hold")
    length = _num_samples(layout, tensors, what)
    if length < num_microbatches:
        raise InputError(too_few_samples(what, length, num_microbatches))
    if num_microbatches == 1:
        return [unflatten(layout, tensors)], [length]
    _check_lists(value, length, what)
    sizes = even_parts(length, num_microbatches)
    pieces = [torch.split(t, sizes) for t in tensors]
    if layout.structure == _TENSOR:
        return list(pieces[0]), sizes
    return [unflatten(layout, [piece[b] for piece in pieces]) for b in range(num_microbatches)], sizes


def _check_lists(value: Any, length: int, what: str) -> None:
    """Raises InputError for lists without tensors that have a value per sample: they are not cut into micro-batches."""
    if isinstance(value, Mapping):
        named = {f"{what}[{name!r}]": each for name, each in value.items()}
    elif isinstance(value, tuple):
        named = {f"{what}[{index}]": each for index, each in enumerate(value)}
    else:
        return
    for name, each in named.items():
        if type(each) is list and len(each) == length and not any(isinstance(item, Tensor | list) for item in each):
            raise InputError(
                f"{name} is a list of {length} values, as many as the batch has samples, and only tensors are cut into "
                "micro-batches: each would get all of them. Pass a tensor; or a tuple, if each is to get all of them."
            )


def samples_of(value: Value, what: str) -> int:
    """The number of samples in a batch. Raises InputError as `split_batch`."""
    if isinstance(value, MicroBatches):
        return sum(sizes_of(value, len(value), what))
    return _num_samples(*flatten(value, f"{what} hold"), what)


def too_few_samples(what: str, num_samples: int, num_microbatches: int) -> str:
    """The error text for a batch that is smaller than the number of micro-batches."""
    return (
        f"{what} hold {num_samples} samples for {num_microbatches} micro-batches: each needs at least one sample. "
        f"Use a batch of {num_microbatches} or more samples, or a schedule of {num_samples} micro-batches."
    )


def _num_samples(layout: Layout, tensors: Sequence[Tensor], what: str) -> int:
    if _holds_packed(layout):
        raise InputError(
            f"{what} hold a PackedSequence, which cannot be split into micro-batches. Pass the padded tensor and the "
            "lengths, and pack them in a layer of the model: stages may exchange a PackedSequence."
        )
    if any(t.is_meta for t in tensors):
        raise InputError(f"{what} hold a tensor on the meta device, which has no values. Pass the batch itself.")
    lengths = {t.shape[0] if t.dim() else -1 for t in tensors}
    if len(lengths) != 1 or -1 in lengths:
        if not lengths:
            raise InputError(
                f"{what} hold no tensor: a batch needs a tensor to split into micro-batches. Pass at least one."
            )
        if -1 in lengths:
            raise InputError(
                f"{what} hold a tensor without dimensions: all tensors of a batch need the samples along dimension 0. "
                "Reshape it, or pass a scalar as a Python number."
            )
        sizes = sorted(lengths)
        raise InputError(
            f"{what} hold tensors with {listed(sizes)} samples along dimension 0: must be the same number "
            f"in all tensors. Repeat a shared tensor for every sample, for example with x.expand({sizes[-1]}, ...)."
        )
    length = lengths.pop()
    if length == 0:
        raise InputError(f"{what} hold 0 samples: every micro-batch needs at least one. Skip empty batches.")
    return length


def join_batch(values: Sequence[Value]) -> Value:
    """Concatenate the outputs of micro-batches along dimension 0; tensors without dimensions are stacked.

    Raises:
        InputError: there are several, and they hold a PackedSequence.
    """
    layouts, tensors = zip(*map(partial(flatten, repeated=True), values), strict=True)
    if len(values) > 1 and _holds_packed(layouts[0]):
        raise InputError(
            "the model returns a PackedSequence, which cannot be joined from micro-batches. Return padded tensors and "
            "lengths (torch.nn.utils.rnn.pad_packed_sequence)."
        )
    joined = [torch.cat(column) if column[0].dim() else torch.stack(column) for column in zip(*tensors, strict=True)]
    return unflatten(layouts[0], joined)
