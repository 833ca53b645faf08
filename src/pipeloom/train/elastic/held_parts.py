"""Which parts of the model a rank holds, as JSON beside a copy of its tensors in memory."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.parallel.placed import Cut, Place, Placed, PlacedBlock, Section
from pipeloom.train.checkpoint.writer import tied_names


class HeldParts(NamedTuple):
    """The arguments of these names of `checkpoint.save`."""

    ranges: dict[str, Range]
    blocks: dict[str, PlacedBlock]
    ties: dict[str, str]
    compute_type: str | None


def held_parts(contents: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of what a rank passes to `checkpoint.save`."""
    return {
        "ranges": dict(contents.get("ranges") or {}),
        "blocks": {name: _to_json(block) for name, block in (contents.get("blocks") or {}).items()},
        "ties": {**(contents.get("ties") or {}), **tied_names(contents["model"])},
        "compute_type": contents.get("compute_type"),
    }


def read_parts(row: Mapping[str, Any]) -> HeldParts:
    """The inverse of `held_parts`."""
    ranges = {name: Range(start, stop, tuple(shape)) for name, (start, stop, shape) in row["ranges"].items()}
    blocks = {name: _from_json(block) for name, block in row["blocks"].items()}
    return HeldParts(ranges, blocks, row["ties"], row["compute_type"])


def _to_json(block: PlacedBlock) -> list[Any]:
    how, place = block
    cuts = [[dim, cut.axes, cut.sections] for dim, cut in how.cuts.items()]
    padded = list(how.padded.items())
    return [how.shape, cuts, how.sum_over, padded, dict(place.coordinates), dict(place.degrees)]


def _from_json(row: list[Any]) -> PlacedBlock:
    shape, cuts, sum_over, padded, coordinates, degrees = row
    found = {dim: Cut(tuple(axes), tuple(Section(*each) for each in sections)) for dim, axes, sections in cuts}
    how = Placed(tuple(shape), found, tuple(sum_over), dict(padded))
    return PlacedBlock(how, Place(coordinates, degrees))
