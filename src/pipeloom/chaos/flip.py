"""`flip_bit`: flips a bit in a file of a checkpoint. No torch."""

from collections.abc import Sequence
from pathlib import Path

_BIT = 1 << 3


def flip_bit(checkpoint: Path, position: float, part: str = "-of-") -> str:
    """Flip a bit of one of a checkpoint's tensor files.

    Args:
        checkpoint: its directory.
        position: where, from 0 to 1, as a fraction of the bytes of all files that are meant, one after another.
        part: of the names of the files that are meant.

    Returns:
        File and byte.
    """
    path, offset = place_in(sorted(path for path in checkpoint.glob("*.safetensors") if part in path.name), position)
    flip_at(path, offset)
    return f"{path.name}, byte {offset}"


def place_in(files: Sequence[Path], position: float) -> tuple[Path, int]:
    """The file and the byte in it at a fraction, from 0 to 1, of the bytes of all files, one after another."""
    offset = int(position * sum(path.stat().st_size for path in files))
    for path in files:
        size = path.stat().st_size
        if offset < size:
            break
        offset -= size
    return path, offset


def flip_at(path: Path, offset: int) -> None:
    """Flip a bit of one byte of a file; the same again undoes it."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ _BIT]))
