"""The parts in which ranks of a pipeline that hold the same parameters exchange gradients. No torch here."""

from collections.abc import Mapping

PART_BYTES = 1 << 20


def gradient_parts(sizes: Mapping[str, float]) -> list[list[str]]:
    """Divide parameters into parts of at most `PART_BYTES` together, by name; a larger one is a part by itself.

    Args:
        sizes: bytes of each, the same on all ranks that hold them.
    """
    parts: list[list[str]] = []
    left = 0.0
    for name, size in sorted(sizes.items()):
        if not parts or size > left:
            parts.append([])
            left = PART_BYTES
        parts[-1].append(name)
        left -= size
    return parts
