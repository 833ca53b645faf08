"""Finds the text files of a run: the files of its data path, without output of pipeloom runs."""

from __future__ import annotations

import glob
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

from pipeloom.errors import DataError
from pipeloom.train.checkpoint.manifest import SEAL_NAME

CONFIG_HEAD = "# pipeloom "  # the first characters of config.yaml in an output directory

# The other files that a run writes. An output directory may also have text files of the user.
_WRITTEN = re.compile(
    r"(metrics\.jsonl|config\.yaml|environment\.json|timelines\.json|timeline\.json\.gz|report\.html|memory\.json"
    r"|data|checkpoint-\d+|previous-\d+)"
)
_TOKENS = re.compile(r"corpus-[0-9a-f]{24}\.(bin|json)")

# Directories of the standard library without library code: tests and installed packages.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text files of a run.

    Attributes:
        root: the base of relative paths.
        files: the files in a fixed order.
        passed_over: reason -> number of files skipped.
        left_out: skipped directories below `root` with output of runs.
    """

    root: Path
    files: Sequence[Path]
    passed_over: dict[str, int]
    left_out: Sequence[Path]


def find_files(path: str | None, tokens_dir: Path, output_dir: Path | None) -> TextFiles:
    """Find the files of `path`: a directory, a glob pattern, a file, or None for the standard library.

    Leaves out `tokens_dir`, `output_dir` and the output directories of other runs, recognized by their config.yaml. If
    `path` is inside such a directory, only the files that runs write are left out.

    Raises:
        DataError: data is missing or unreadable, or all files are left out.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return TextFiles(root, [f for f in _walk(root, _STDLIB_SKIPPED) if f.suffix == ".py" and f.is_file()], {}, ())
    root = Path(path).expanduser()
    if root.is_dir():
        files = list(_walk(root))
    elif root.is_file():
        root, files = root.parent, [root]
    elif root.exists():
        raise DataError(f"data path {path!r} is a device, a pipe or a socket: must be a directory or file.")
    elif glob.has_magic(path):
        files = sorted(match for match in map(Path, glob.glob(str(root), recursive=True)) if not match.is_dir())
        root = Path(*takewhile(lambda part: not glob.has_magic(part), root.parts))
    else:
        raise DataError(f"data path {path!r} does not exist: must be a directory, a glob pattern or a file.")
    found = [file for file in files if file.is_file()]  # reading a pipe or device may not terminate
    passed_over = {"broken link": 0, "no regular file": 0}
    for file in files:
        if not file.is_file():
            passed_over["no regular file" if file.exists() else "broken link"] += 1
    writer = _Writers(root, tokens_dir, output_dir)
    writers = {file: writer(file) for file in found}
    files = [file for file in found if writers[file] is None]
    if found and not files:
        raise DataError(
            f"data path {path!r}: its {len(found)} files are in {writers[found[0]]}, a directory for the output of a "
            "run, which is not read. Use another output_dir, or move the text."
        )
    if not files:
        raise DataError(f"data path {path!r} has no files. Training needs text: choose another path.")
    return TextFiles(root, files, passed_over, sorted({place for place in writers.values() if place is not None}))


class _Writers:
    """Recognizes output of runs: `writer(file)` is the directory of the run that wrote a file, or None."""

    def __init__(self, root: Path, tokens_dir: Path, output_dir: Path | None) -> None:
        self._root = root
        self._shown = {place.resolve(): place for place in (tokens_dir, output_dir) if place is not None}
        self._tokens_dir = tokens_dir.resolve()
        self._output_dir = output_dir and output_dir.resolve()
        self._is_output = cache(_is_output)

    def __call__(self, file: Path) -> Path | None:
        real = file.resolve()
        if self._output_dir is not None and self._is_written(real, self._output_dir, self._root.resolve()):
            return self._shown[self._output_dir]
        if real.is_relative_to(self._tokens_dir):
            return self._shown[self._tokens_dir]
        places = [place for place in reversed(file.parents) if place.is_relative_to(self._root)]
        of_runs = (place for place in places if self._is_output(place) and self._is_written(file, place, self._root))
        return next(of_runs, file.parent if _TOKENS.fullmatch(file.name) else None)

    @staticmethod
    def _is_written(file: Path, place: Path, root: Path) -> bool:
        """Whether the run in `place` wrote `file`; decided by the name if `root` is inside `place`."""
        if not file.is_relative_to(place):
            return False
        return not root.is_relative_to(place) or bool(_WRITTEN.fullmatch(file.relative_to(place).parts[0]))


def _is_output(directory: Path) -> bool:
    """Whether a directory is an output directory or a checkpoint of pipeloom."""
    try:
        with open(directory / "config.yaml", encoding="utf-8", errors="replace") as file:
            if file.read(len(CONFIG_HEAD)) == CONFIG_HEAD:
                return True
    except OSError:
        pass
    return (directory / SEAL_NAME).is_file()


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    def unreadable(error: OSError) -> None:
        raise DataError(
            f"data directory {error.filename}: {error.strerror}. Make it readable, or choose another."
        ) from None

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)
