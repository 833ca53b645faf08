"""Which files a run reads: those that its data path names, without what runs of pipeloom wrote between them."""

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

CONFIG_HEAD = "# pipeloom "  # how the config.yaml of an output directory begins

# What stands beside it there, and nothing else: a run may have its text in the directory it writes to.
_WRITTEN = re.compile(
    r"(metrics\.jsonl|config\.yaml|environment\.json|timelines\.json|timeline\.json\.gz|report\.html|memory\.json"
    r"|data|checkpoint-\d+|previous-\d+)"
)
_TOKENS = re.compile(r"corpus-[0-9a-f]{24}\.(bin|json)")

# The standard library without what is no library code: tests, and packages installed beside it.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


@dataclass(frozen=True, slots=True)
class TextFiles:
    """Files in a fixed order.

    Attributes:
        root: the directory that relative paths start from.
        passed_over: why files are not among them, and how many for each reason.
        left_out: directories below `root` with what runs wrote.
    """

    root: Path
    files: Sequence[Path]
    passed_over: dict[str, int]
    left_out: Sequence[Path]


def find_files(path: str | None, tokens_dir: Path, output_dir: Path | None) -> TextFiles:
    """The files that `path` names: a directory, a glob pattern, a file, or None for the standard library.

    Left out are `tokens_dir`, `output_dir` and the output directories of other runs, known by their config.yaml. Where
    the text lies in such a directory, only what runs write is left out of it.

    Raises:
        DataError: missing or unreadable data, or nothing but what is left out.
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
        raise DataError(f"data path {path!r} is a device, a pipe or a socket: training reads files; name one")
    elif glob.has_magic(path):
        files = sorted(match for match in map(Path, glob.glob(str(root), recursive=True)) if not match.is_dir())
        root = Path(*takewhile(lambda part: not glob.has_magic(part), root.parts))
    else:
        raise DataError(f"data path {path!r} does not exist: it is a directory, a glob pattern or a file; correct it")
    found = [file for file in files if file.is_file()]  # reading anything else may never end
    passed_over = {"broken link": 0, "no regular file": 0}
    for file in files:
        if not file.is_file():
            passed_over["no regular file" if file.exists() else "broken link"] += 1
    writer = _Writers(root, tokens_dir, output_dir)
    writers = {file: writer(file) for file in found}
    files = [file for file in found if writers[file] is None]
    if found and not files:
        raise DataError(
            f"data path {path!r}: its {len(found)} files lie in {writers[found[0]]}, where a run keeps its tokens and "
            "results and nothing is read from; name another output_dir, or move the text"
        )
    if not files:
        raise DataError(f"data path {path!r} has no files: training needs text; name another")
    return TextFiles(root, files, passed_over, sorted({place for place in writers.values() if place is not None}))


class _Writers:
    """Which run wrote a file, if any did: `writer(file)` is its directory, or None."""

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
        """Whether `file` is of the run that writes to `place`: all that is there, unless the text is there too."""
        if not file.is_relative_to(place):
            return False
        return not root.is_relative_to(place) or bool(_WRITTEN.fullmatch(file.relative_to(place).parts[0]))


def _is_output(directory: Path) -> bool:
    """Whether a run of pipeloom wrote this directory, or a checkpoint."""
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
            f"data directory {error.filename}: {error.strerror}; make it readable or name another"
        ) from None

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)
