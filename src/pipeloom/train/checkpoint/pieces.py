"""Where the elements of sharded tensors are stored. Needs no torch.

A rank may hold the elements start..stop of a flattened parameter. It writes this shard as a one-dimensional tensor
``NAME[start:stop]``, called a piece here; a shard with all elements is written as a tensor ``NAME`` of full shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import Manifest, root_name


class Piece(NamedTuple):
    """A tensor in a file. `range` is None for a full tensor, whose shape is in the file."""

    file: str
    key: str
    range: Range | None


class Writer(NamedTuple):
    """The rank that writes a piece, and the name of the parameter on that rank."""

    rank: int
    name: str


def piece_key(name: str, part: Range) -> str:
    """The name of a piece in its file."""
    return f"{name}[{part.start}:{part.stop}]"


def size_mismatch(name: str, num_elements: int, part: Range) -> CheckpointError:
    """The error of a tensor that has another number of elements than its range."""
    return CheckpointError(
        f"{name} has {num_elements} elements, but its range {part.start} to {part.stop} has {part.stop - part.start}. "
        "Pass tensors and ranges of the same layout."
    )


def assign_writers(
    held: Sequence[Mapping[str, Range | None]], ties: Mapping[str, str]
) -> dict[str, dict[Range | None, Writer]]:
    """Assign each piece to a rank, so that each element is written once.

    Args:
        held: per rank, the range of each tensor that it holds by name; None for the full tensor.
        ties: alias of a tied tensor -> the name that it is stored under.

    Returns:
        Stored name -> range -> the lowest rank that holds this range. Empty ranges are left out.

    Raises:
        CheckpointError: no rank holds some elements, or ranges overlap partially.
    """
    found: dict[str, dict[Range | None, Writer]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            stored = root_name(name, ties)
            writers = found.setdefault(stored, {})
            if part is not None and shapes.setdefault(stored, part.shape) != part.shape:
                raise CheckpointError(
                    f"{name} has shape {part.shape} on rank {rank} and {shapes[stored]} on another. Build the same "
                    "model on all ranks."
                )
            if part is None or part.start < part.stop:
                writers.setdefault(part, Writer(rank, name))
    for stored, writers in found.items():
        if len(writers) > 1 or None not in writers:
            _check_each_once(stored, writers, shapes[stored])
    keys = {piece_key(name, part) for name, parts in found.items() for part in parts if part is not None}
    if collision := sorted(keys & found.keys()):
        raise CheckpointError(f"tensor {collision[0]} has the name of a piece of another tensor. Rename it.")
    return found


def _check_each_once(name: str, writers: Mapping[Range | None, Writer], shape: tuple[int, ...]) -> None:
    total, end, before = math.prod(shape), 0, -1
    spans = sorted(
        (0, total, writer.rank) if part is None else (*part[:2], writer.rank) for part, writer in writers.items()
    )
    for start, stop, rank in [*spans, (total, total, -1)]:
        if stop > total:
            raise CheckpointError(
                f"the range of {name} {shape} on rank {rank} ends at {stop}: the tensor has {total} elements. Correct "
                "the range."
            )
        if start > end:
            raise CheckpointError(
                f"elements {end} to {start} of {name} {shape} are on no rank: together the ranks must hold all. Save "
                "from all ranks, with the ranges of their layout."
            )
        if start < end:
            raise CheckpointError(
                f"elements {start} to {min(end, stop)} of {name} {shape} are in different ranges on ranks {before} and "
                f"{rank}: ranges must be equal or disjoint. Pass the ranges of the layout."
            )
        end, before = stop, rank


def stored_model(manifest: Manifest, weight_map: Mapping[str, str]) -> dict[str, list[Piece]]:
    """The pieces of each tensor of the model by name, in the order of the index."""
    names = {piece_key(name, part): (name, part) for row in manifest.parts for name, part in row.pieces.items()}
    files = {part.model for part in manifest.parts}
    found: dict[str, list[Piece]] = {}
    for key, file in weight_map.items():
        if file not in files:  # only these are in the manifest, with a hash and without a path
            raise CheckpointError(f"the index has {key} in {file}, which has no model tensors. Use another checkpoint.")
        name, part = names.get(key, (key, None))
        found.setdefault(name, []).append(Piece(file, key, part))
    return found


def stored_optimizer(manifest: Manifest) -> dict[str, dict[str, list[Piece]]]:
    """The pieces of the optimizer state by parameter and key; parameters without tensors are left out."""
    found: dict[str, dict[str, list[Piece]]] = {}
    for row in manifest.parts:
        file = row.optimizer or ""
        for name, keys in row.optimizer_tensors.items():
            for key in keys:
                found.setdefault(name, {}).setdefault(key, [Piece(file, f"{name}/{key}", None)])
        for name, keys in row.optimizer_pieces.items():
            part = row.pieces[name]
            for key in keys:
                piece = Piece(file, f"{piece_key(name, part)}/{key}", part)
                found.setdefault(name, {}).setdefault(key, []).append(piece)
    return found


def cover(name: str, pieces: Iterable[tuple[Range, Piece]], start: int, stop: int) -> list[tuple[Piece, int, int]]:
    """The pieces with elements `start` to `stop`, in order, each with the range needed, relative to the piece.

    Raises:
        CheckpointError: an element is in no piece or in several.
    """
    found: list[tuple[Piece, int, int]] = []
    end = start
    for part, piece in sorted(pieces):
        if part.stop <= start or part.start >= stop:
            continue
        if max(part.start, start) != end:
            break
        found.append((piece, end - part.start, min(part.stop, stop) - part.start))
        end = min(part.stop, stop)
    if end != stop:
        raise CheckpointError(
            f"the elements of {name} from {end} are missing or duplicated in the checkpoint. Use another checkpoint."
        )
    return found
