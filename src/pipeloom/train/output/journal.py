"""`Journal`: what a process of a run notes while it runs, for those who read it during the run and behind it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeloom.processes.black_box import BlackBox
from pipeloom.train.output.directory import append_metrics


class Journal:
    """The phases and the metrics of a run.

    Args:
        black_box: of this process, if it was launched with one.
        directory: where ``metrics.jsonl`` is; None for all processes but the first, which write none.
    """

    def __init__(self, black_box: BlackBox | None, directory: Path | None) -> None:
        self._black_box, self._directory = black_box, directory

    def enter(self, phase: str) -> None:
        """Tell the black box what comes now."""
        if self._black_box is not None:
            self._black_box.phase = phase

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row of metrics down."""
        if self._directory is not None:
            append_metrics(self._directory, row)
