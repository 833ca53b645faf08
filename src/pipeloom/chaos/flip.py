"""`flip_bit`: flips a bit in a file of a checkpoint. No torch."""

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
    files = sorted(path for path in checkpoint.glob("*.safetensors") if part in path.name)
    offset = int(position * sum(path.stat().st_size for path in files))
    for path in files:
        size = path.stat().st_size
        if offset < size:
            break
        offset -= size
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ _BIT]))
    return f"{path.name}, byte {offset}"
