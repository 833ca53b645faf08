"""Which rank writes which elements of a tensor that several ranks hold: each element once. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.boxes import Box, cover_box
from pipeloom.train.checkpoint.manifest import root_name
from pipeloom.train.checkpoint.pieces import piece_key


class HeldTensor(NamedTuple):
    """What a rank holds of a tensor; the ranks exchange it as JSON."""

    part: Range | None  # the range of elements; None for the full tensor
    states: tuple[str, ...] = ()  # keys of the optimizer state with one number per element
    boxes: tuple[Box, ...] | None = None  # instead of a range, the rectangles of a block that this rank owns

    @classmethod
    def from_json(cls, row: list[Any]) -> HeldTensor:
        part, states, boxes = row
        found = None if boxes is None else tuple(map(Box.from_json, boxes))
        return cls(part and Range(part[0], part[1], tuple(part[2])), tuple(states), found)


class WrittenTensor(NamedTuple):
    """What a rank writes of a tensor."""

    name: str  # on this rank
    part: Range | None  # the range of elements; None for the full tensor
    leads: bool  # whether the rank also writes the optimizer state that is the same for all shards
    boxes: tuple[Box, ...] = ()  # instead of a range, rectangles


def written_by_ranks(held: list[dict[str, HeldTensor]], ties: Mapping[str, str]) -> list[dict[str, WrittenTensor]]:
    """By rank: stored name -> what it writes. Each element is written once, by the lowest rank that holds its range.

    Args:
        held: what each rank holds, by name.
        ties: alias of a tied tensor -> the name that it is stored under.

    Raises:
        CheckpointError: elements or states are missing, or ranges overlap partially; the same error on every rank.
    """
    owned: list[dict[str, WrittenTensor]] = [{} for _ in held]
    for stored, writers in _writers(held, ties).items():
        states = [(each, set(held[each][name].states)) for each, name in writers.values()]
        for other, keys in states[1:]:
            first, wanted = states[0]
            if differ := sorted(keys ^ wanted):
                present, absent = (other, first) if differ[0] in keys else (first, other)
                raise CheckpointError(
                    f"rank {present} has optimizer state {differ[0]!r} for its shard of {stored}, but rank {absent} "
                    "has none. Step the optimizer on every rank."
                )
        leader = min(each for each, _ in writers.values())
        for part, (writer, name) in writers.items():
            if isinstance(part, Box):
                before = owned[writer].get(stored)
                boxes = (part,) if before is None else (*before.boxes, part)
                owned[writer][stored] = WrittenTensor(name, None, leads=writer == leader, boxes=boxes)
            else:
                owned[writer][stored] = WrittenTensor(name, part, leads=writer == leader)
    return owned


def _writers(
    held: list[dict[str, HeldTensor]], ties: Mapping[str, str]
) -> dict[str, dict[Range | Box | None, tuple[int, str]]]:
    """Stored name -> range or box -> the lowest rank that holds it, and its name there. Empty ranges are left out."""
    found: dict[str, dict[Range | Box | None, tuple[int, str]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    in_boxes: dict[str, tuple[int, ...]] = {}  # shapes of the tensors that ranks hold in blocks
    for rank, tensors in enumerate(held):
        for name, (part, _, boxes) in tensors.items():
            stored = root_name(name, ties)
            writers = found.setdefault(stored, {})
            for box in boxes or ():
                writers.setdefault(box, (rank, name))
            if boxes is not None:
                in_boxes[stored] = boxes[0].shape if boxes else in_boxes.get(stored, ())
                continue
            if part is not None and shapes.setdefault(stored, part.shape) != part.shape:
                raise CheckpointError(
                    f"{name} has shape {part.shape} on rank {rank} and {shapes[stored]} on another. Build the same "
                    "model on all ranks."
                )
            if part is None or part.start < part.stop:
                writers.setdefault(part, (rank, name))
    for stored, writers in found.items():
        if stored in in_boxes:
            _check_boxes(stored, writers, in_boxes[stored])
        elif len(writers) > 1 or None not in writers:
            _check_each_once(stored, writers, shapes[stored])
    keys = {piece_key(name, part) for name, parts in found.items() for part in parts if part is not None}
    if collision := sorted(keys & found.keys()):
        raise CheckpointError(
            f"tensor {collision[0]!r}: checkpoints store shards of other tensors under names that end in [start:stop], "
            f"and {collision[0].rpartition('[')[0]!r} has a shard of this name. Rename the parameter or buffer."
        )
    return found


def _check_boxes(name: str, writers: Mapping[Range | Box | None, tuple[int, str]], shape: tuple[int, ...]) -> None:
    boxes = [(part, part) for part in writers if isinstance(part, Box)]
    if len(boxes) != len(writers) or any(box.shape != shape for box, _ in boxes):
        raise CheckpointError(
            f"{name} is in blocks of shape {shape} on some ranks and held in another way on others. Build the same "
            "model on all ranks."
        )
    try:
        cover_box(name, boxes, Box.full(shape))
    except CheckpointError:
        raise CheckpointError(
            f"the blocks of {name} {shape} on all ranks do not hold each element once. Save from all ranks, with the "
            "blocks of their layout."
        ) from None


def _check_each_once(name: str, writers: Mapping[Range | Box | None, tuple[int, str]], shape: tuple[int, ...]) -> None:
    total, end, before = math.prod(shape), 0, -1
    spans = sorted(
        (part.start, part.stop, rank) if isinstance(part, Range) else (0, total, rank)
        for part, (rank, _) in writers.items()
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
