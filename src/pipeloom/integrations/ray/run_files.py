"""`RunFiles`: what a run writes into its output directory, while it runs."""

import math
import os
from pathlib import Path
from typing import Any

from pipeloom.train.checkpoint.directory import is_ours
from pipeloom.train.output.reporters import row_of

Report = tuple[dict[str, Any], str | None]  # metrics, and the checkpoint that was saved after them


class RunFiles:
    """What a run has written into its output directory since this object was made.

    A run that goes on from a checkpoint writes metrics.jsonl anew, with the rows up to the checkpoint as they were:
    these are not new.

    Args:
        output_dir: of the run.
        since: what was written after this step is new, too. None: only what comes.
    """

    def __init__(self, output_dir: Path, since: int | None = None) -> None:
        self._directory = output_dir
        self._inode, self._read = 0, 0
        rows, last = self._rows(), math.inf if since is None else since
        self._before = frozenset(row for row in rows if (each := row_of(row)) is not None and each["step"] <= last)
        self._known = {path for path, step in self._checkpoints().items() if step <= last}
        self._read = 0

    def news(self) -> list[Report]:
        """The newest row, new evaluations, and new checkpoints, each with the last row of its step.

        Rows are without lists and objects. Other rows stay in metrics.jsonl alone: a report takes Ray longer than a
        short step does.
        """
        saved = self._checkpoints()  # first: the rows of their steps are written by then
        rows = [row for line in self._rows() if line not in self._before and (row := row_of(line)) is not None]
        reports: list[Report] = [
            ({key: value for key, value in row.items() if not isinstance(value, dict | list)}, None) for row in rows
        ]
        for path in sorted(set(saved) - self._known, key=saved.__getitem__):
            place = next((at for at in reversed(range(len(reports))) if reports[at][0]["step"] <= saved[path]), -1)
            if place >= 0 and reports[place][0]["step"] == saved[path]:
                reports[place] = (reports[place][0], str(path))
            else:
                reports.insert(place + 1, ({"step": saved[path]}, str(path)))
        self._known = set(saved)
        return [each for each in reports if each is reports[-1] or each[1] or "eval_loss" in each[0]]

    def _checkpoints(self) -> dict[Path, int]:
        """All checkpoints and their steps."""
        found = {}
        for path in self._directory.glob("checkpoint-*"):  # nothing is cleaned: the run may be writing one
            step = path.name.rpartition("-")[2]
            if step.isdecimal() and is_ours(path):
                found[path] = int(step)
        return found

    def _rows(self) -> list[bytes]:
        """The whole lines that were written since the last call."""
        try:
            with (self._directory / "metrics.jsonl").open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._read:
                    self._inode, self._read = found.st_ino, 0
                file.seek(self._read)
                text = file.read()
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()
