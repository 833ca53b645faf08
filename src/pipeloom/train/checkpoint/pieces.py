"""`Piece`: where the elements of a tensor are stored, in full, by ranges or by boxes. No torch."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pipeloom.engine.stores.parameter_range import Range
from pipeloom.errors import CheckpointError, folded
from pipeloom.train.checkpoint.boxes import Box
from pipeloom.train.checkpoint.manifest import INDEX_NAME, Manifest


class Piece(NamedTuple):
    """A tensor in a file. `range` is None for a full tensor, whose shape is in the file."""

    file: str
    key: str
    range: Range | Box | None


def piece_key(name: str, part: Range | Box) -> str:
    """The name of a piece in its file."""
    return f"{name}[{part if isinstance(part, Box) else f'{part.start}:{part.stop}'}]"


def stored_model(manifest: Manifest, weight_map: Mapping[str, str]) -> dict[str, list[Piece]]:
    """The pieces of each tensor of the model by name, in the order of the index.

    Raises:
        CheckpointError: the pieces of a tensor do not belong together, or are in a file of something else.
    """
    names: dict[str, tuple[str, Range | Box]] = {}
    for row in manifest.parts:
        names |= {piece_key(name, part): (name, part) for name, part in row.pieces.items()}
        names |= {piece_key(name, box): (name, box) for name, boxes in row.blocks.items() for box in boxes}
    files = {part.model for part in manifest.parts}
    found: dict[str, list[Piece]] = {}
    for key, file in weight_map.items():
        if file not in files:  # only these are in the manifest, with a hash and without a path
            raise CheckpointError(
                f"{INDEX_NAME} has {folded(key)} in {folded(file)}, which has no model tensors. Use another checkpoint."
            )
        name, part = names.get(key, (key, None))
        found.setdefault(name, []).append(Piece(file, key, part))
    for name, pieces in found.items():
        _check_alike(name, pieces)
    return found


def stored_optimizer(manifest: Manifest) -> dict[str, dict[str, list[Piece]]]:
    """The pieces of the optimizer state by parameter and key; parameters without tensors are left out.

    Raises:
        CheckpointError: the pieces of a state do not belong together.
    """
    found: dict[str, dict[str, list[Piece]]] = {}
    for row in manifest.parts:
        file = row.optimizer or ""
        for name, keys in row.optimizer_tensors.items():
            for key in keys:
                found.setdefault(name, {}).setdefault(key, [Piece(file, f"{name}/{key}", None)])
        parts: dict[str, list[Range | Box]] = {name: [row.pieces[name]] for name in row.optimizer_pieces}
        parts |= {name: list(boxes) for name, boxes in row.optimizer_blocks.items()}
        for name, keys in (row.optimizer_pieces | row.block_states).items():
            for key in keys:
                pieces = [Piece(file, f"{piece_key(name, part)}/{key}", part) for part in parts[name]]
                found.setdefault(name, {}).setdefault(key, []).extend(pieces)
    for name, states in found.items():
        for key, pieces in states.items():
            _check_alike(f"{name}/{key}", pieces)
    return found


def _check_alike(name: str, pieces: list[Piece]) -> None:
    """Raises CheckpointError where pieces are of different kinds, or of tensors of different shapes."""
    kinds = {type(piece.range) for piece in pieces}
    shapes = {piece.range.shape for piece in pieces if piece.range is not None}
    if len(kinds) > 1 or len(shapes) > 1 or (kinds == {type(None)} and len(pieces) > 1):
        raise CheckpointError(f"the pieces of {name} in the checkpoint do not fit each other. Use another checkpoint.")


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
