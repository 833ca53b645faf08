"""`compare`: whether two training runs have the same losses, weights and optimizer state to the last bit. No torch."""

import json
import math
from pathlib import Path
from typing import NamedTuple

from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.directory import latest
from pipeloom.train.checkpoint.manifest import verify
from pipeloom.train.output.reporters import row_of

_NUMBERS = ("step", "loss", "grad_norm", "lr", "eval_loss")
_MISSING = "null"
_Row = tuple[str, ...]
_KINDS = {"weights": "model-", "optimizer": "optimizer-", "generators": "random-"}


class Outcome(NamedTuple):
    """What is equal in two runs: bitwise, or within a tolerance; for what is not, the text says how it differs.

    Attributes:
        losses: of all steps and evaluations, with gradient norms and learning rates.
        weights, optimizer, generators: files of the last checkpoint; with a tolerance, they are not compared.
    """

    losses: str
    weights: str
    optimizer: str
    generators: str

    @property
    def equal(self) -> bool:
        """Whether all that is compared is equal."""
        return set(self) <= {EQUAL, NOT_COMPARED}


EQUAL, NOT_COMPARED = "equal", "not compared"


def compare(
    output_dir: Path, reference: Path, *, may_miss_evaluation: bool = False, tolerance: float | None = None
) -> Outcome:
    """Compare two output directories.

    Args:
        output_dir, reference: of the runs.
        may_miss_evaluation: whether evaluations may be left out, as one that is due at a pre-emption is.
        tolerance: how much numbers of a step may differ, as a fraction, where steps had another layout; None: nothing.
    """
    if tolerance is not None:
        close = _losses(_story(output_dir), _story(reference), may_miss_evaluation=False, tolerance=tolerance)
        return Outcome(close, *[NOT_COMPARED] * len(_KINDS))
    found, expected = _hashes(output_dir), _hashes(reference)
    losses = _losses(_story(output_dir), _story(reference), may_miss_evaluation=may_miss_evaluation)
    return Outcome(losses, *(_kind(found, expected, prefix) for prefix in _KINDS.values()))


def _losses(rows: list[_Row], wanted: list[_Row], *, may_miss_evaluation: bool, tolerance: float | None = None) -> str:
    if may_miss_evaluation:
        present = {row[0] for row in rows if row[-1] != _MISSING}
        wanted = [row for row in wanted if row[-1] == _MISSING or row[0] in present]
    for row, other in zip(rows, wanted, strict=False):
        if row != other and not (tolerance and _alike(row, other, tolerance)):
            return f"differ from step {other[0]}"
    return EQUAL if len(rows) == len(wanted) else f"{len(rows)} rows instead of {len(wanted)}"


def _alike(row: _Row, other: _Row, tolerance: float) -> bool:
    if row[0] != other[0] or [each == _MISSING for each in row] != [each == _MISSING for each in other]:
        return False
    pairs = [(float(one), float(two)) for one, two in zip(row, other, strict=True) if one != _MISSING]
    return all(math.isclose(one, two, rel_tol=tolerance) for one, two in pairs)


def _story(output_dir: Path) -> list[_Row]:
    try:
        lines = (output_dir / "metrics.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    rows = [row_of(line) or {} for line in lines]  # a damaged row is like none of another run
    return [tuple(json.dumps(row.get(key)) for key in _NUMBERS) for row in rows]


def _hashes(output_dir: Path) -> tuple[str, dict[str, str]]:
    """The name of the last checkpoint and the hashes of its files; none and its error if it is damaged."""
    path = latest(output_dir)
    if path is None:
        return "none", {}
    try:
        return path.name, {name: record.sha256 for name, record in verify(path).files.items()}
    except CheckpointError as error:
        return str(error), {}


def _kind(found: tuple[str, dict[str, str]], expected: tuple[str, dict[str, str]], prefix: str) -> str:
    if found[0] != expected[0]:
        return f"{found[0]} instead of {expected[0]}"
    mine, wanted = ({n: h for n, h in files.items() if n.startswith(prefix)} for _, files in (found, expected))
    different = sorted(name for name in {**mine, **wanted} if mine.get(name) != wanted.get(name))
    return f"{', '.join(different)} differ" if different else EQUAL
