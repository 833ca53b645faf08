"""Which elements of which tensor lie where, for tensors that were saved in pieces. No torch here.

A rank may hold elements start..stop of a flattened parameter instead of all of it. It writes them as a tensor of one
dimension named ``NAME[start:stop]``; where they are all of the parameter, as an ordinary tensor ``NAME`` of its shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.manifest import Manifest, root_name


class Piece(NamedTuple):
    """One tensor in one file; `range` is None where it is a whole tensor, whose shape its file knows."""

    file: str
    key: str
    range: Range | None


class Writer(NamedTuple):
    """Who writes a piece, and the name that it goes by on that rank."""

    rank: int
    name: str


def piece_key(name: str, part: Range) -> str:
    """What a piece is called in its file."""
    return f"{name}[{part.start}:{part.stop}]"


def assign_writers(
    held: Sequence[Mapping[str, Range | None]], ties: Mapping[str, str]
) -> dict[str, dict[Range | None, Writer]]:
    """Who writes what, so that each element is written once.

    Args:
        held: for each rank, what it has of each name; None is all of it.
        ties: further names of a tensor, and the one it is stored under.

    Returns:
        By the name it is stored under and by part, the lowest rank that holds that part. Empty parts are left out.

    Raises:
        CheckpointError: some elements are held by no rank, or in parts that overlap.
    """
    found: dict[str, dict[Range | None, Writer]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            stored = root_name(name, ties)
            writers = found.setdefault(stored, {})
            if part is not None and shapes.setdefault(stored, part.shape) != part.shape:
                raise CheckpointError(
                    f"{name} is part of shape {part.shape} on rank {rank} and of {shapes[stored]} on another: all "
                    "ranks have the same model; build it alike on each"
                )
            if part is None or part.start < part.stop:
                writers.setdefault(part, Writer(rank, name))
    for stored, writers in found.items():
        if len(writers) > 1 or None not in writers:
            _check_each_once(stored, writers, shapes[stored])
    keys = {piece_key(name, part) for name, parts in found.items() for part in parts if part is not None}
    if collision := sorted(keys & found.keys()):
        raise CheckpointError(f"a tensor is named {collision[0]}, as a piece of another will be: rename it")
    return found


def _check_each_once(name: str, writers: Mapping[Range | None, Writer], shape: tuple[int, ...]) -> None:
    total, end, before = math.prod(shape), 0, -1
    spans = sorted(
        (0, total, writer.rank) if part is None else (*part[:2], writer.rank) for part, writer in writers.items()
    )
    for start, stop, rank in [*spans, (total, total, -1)]:
        if stop > total:
            raise CheckpointError(
                f"{name} {shape} has {total} elements, rank {rank} holds up to {stop}: correct its range"
            )
        if start > end:
            raise CheckpointError(
                f"elements {end} to {start} of {name} {shape} are held by no rank: together the ranks must hold all; "
                "save from all ranks, with the ranges of their layout"
            )
        if start < end:
            raise CheckpointError(
                f"elements {start} to {min(end, stop)} of {name} {shape} are held by ranks {before} and {rank} in "
                "parts that differ: parts must be the same or apart; give the ranges of the layout"
            )
        end, before = stop, rank


def stored_model(manifest: Manifest, weight_map: Mapping[str, str]) -> dict[str, list[Piece]]:
    """The model's tensors by name, in the order of the index, each with the pieces that hold it."""
    names = {piece_key(name, part): (name, part) for row in manifest.parts for name, part in row.pieces.items()}
    files = {part.model for part in manifest.parts}
    found: dict[str, list[Piece]] = {}
    for key, file in weight_map.items():
        if file not in files:  # whose hash is known, and which lies in the directory
            raise CheckpointError(f"the index has {key} in {file}, which holds no model: use another checkpoint")
        name, part = names.get(key, (key, None))
        found.setdefault(name, []).append(Piece(file, key, part))
    return found


def stored_optimizer(manifest: Manifest) -> dict[str, dict[str, list[Piece]]]:
    """The tensors of the optimizer's state by parameter and key; a parameter without tensors is not in it."""
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
    """The pieces that elements `start` to `stop` lie in, in order, with the elements wanted of each, counted in it.

    Raises:
        CheckpointError: some lie in none, or in two.
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
            f"elements from {end} of {name} are not in the checkpoint once each: it is incomplete; use another one"
        )
    return found
