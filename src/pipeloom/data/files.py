"""The files of a data path: a directory, a glob pattern, a file, or a URL of any of them."""

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from pipeloom.data.opened import is_url, open_file_system, unreadable
from pipeloom.data.shards import Shard
from pipeloom.errors import DataError

Writer = Callable[[Path], Path | None]  # the directory of the run that wrote a file, or None
_MAGIC = re.compile(r"[*\[]")  # of a pattern in a URL, where a question mark begins a query
_TOKENS = re.compile(r"corpus-[0-9a-f]{24}\.(bin|json)")

# Directories of the standard library without library code: tests and installed packages.
_STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


class Found(NamedTuple):
    """The files of a data path.

    Attributes:
        root: what names are relative to.
        shards: in a fixed order.
        passed_over: reason -> number of files skipped.
        left_out: directories below the base with output of runs, skipped.
    """

    root: str
    shards: Sequence[Shard]
    passed_over: dict[str, int]
    left_out: Sequence[Path]


def find_files(path: str | None, tokens_dir: Path, writer_in: Callable[[Path], Writer] | None = None) -> Found:
    """Find the files of `path`: a directory, a glob pattern, a file, a URL, or None for the standard library.

    Args:
        path: as given.
        tokens_dir: the cache of tokens, left out.
        writer_in: from the base directory, what tells which files runs have written: they are left out too.

    Raises:
        DataError: data is missing or unreadable, or all files are left out.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files: Sequence[Path] = [f for f in _walk(root, _STDLIB_SKIPPED) if f.suffix == ".py" and f.is_file()]
        return Found(str(root), [Shard.of(file, root) for file in files], {}, ())
    if is_url(path):
        return _find_remote(path)
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
        raise DataError(f"data path {path!r} does not exist: must be a directory, a glob pattern, a file or a URL.")
    return _without_output(path, root, files, tokens_dir.resolve(), writer_in)


def weighted_paths(mixture: str) -> list[tuple[str, Fraction]]:
    """The paths of a mixture such as ``code=0.7,web/*.parquet=0.3``, and their weights.

    Raises:
        DataError: an entry has no path or no weight above 0, or a path is named twice.
    """
    found: list[tuple[str, Fraction]] = []
    for entry in mixture.split(","):
        path, _, number = entry.strip().rpartition("=")
        try:
            weight = Fraction(number)
        except (ValueError, ZeroDivisionError):
            weight = Fraction(0)
        if not path or weight <= 0:
            raise DataError(
                f"data.mixture={mixture}: entry {entry!r} must be a path, =, and a weight above 0, such as code=0.7. "
                "Change it."
            )
        if path in dict(found):
            raise DataError(f"data.mixture={mixture}: names {path} twice. Give it one weight.")
        found.append((path, weight))
    return found


def _without_output(
    path: str, root: Path, files: Sequence[Path], tokens_dir: Path, writer_in: Callable[[Path], Writer] | None
) -> Found:
    writer: Writer = (lambda file: None) if writer_in is None else writer_in(root)
    writers: dict[Path, Path | None] = {}
    passed_over = {"broken link": 0, "no regular file": 0}
    for file in files:
        if file.is_file():  # reading a pipe or device may not terminate
            is_tokens = file.resolve().is_relative_to(tokens_dir)
            own = tokens_dir if is_tokens else file.parent if _TOKENS.fullmatch(file.name) else None
            writers[file] = writer(file) or own
        else:
            passed_over["no regular file" if file.exists() else "broken link"] += 1
    files = [file for file in files if file in writers and writers[file] is None]
    if writers and not files:
        raise DataError(
            f"data path {path!r}: its {len(writers)} files are in {next(iter(writers.values()))}, a directory for the "
            "output of a run, which is not read. Use another output_dir, or move the text."
        )
    if not files:
        raise DataError(f"data path {path!r} has no files. Training needs text: choose another path.")
    left_out = sorted({place for place in writers.values() if place is not None})
    return Found(str(root), [Shard.of(file, root) for file in files], passed_over, left_out)


def _find_remote(url: str) -> Found:
    """The files behind a URL of `fsspec`: a file, a directory or a glob pattern."""
    system, path = open_file_system(url)
    try:
        if _MAGIC.search(path):
            found = system.glob(path, detail=True)
        elif system.isdir(path):
            found = system.find(path, detail=True)
        else:
            found = {path: system.info(path)} if system.exists(path) else {}
        infos = {name: info if info.get("size") is not None else system.info(name) for name, info in found.items()}
    except Exception as error:  # of any type, from file systems
        raise unreadable(url, error) from None
    base = "/".join(takewhile(lambda part: not _MAGIC.search(part), path.split("/")))
    shards = []
    for name, info in sorted(infos.items()):
        relative = os.path.relpath(name, base)
        hidden = any(part.startswith(".") for part in relative.split("/")) and relative != "."
        if info.get("type") == "directory" or hidden:
            continue
        below = name.rsplit("/", 1)[-1] if relative == "." else relative
        shards.append(Shard(system.unstrip_protocol(name), below, int(info.get("size") or 0), _version(info)))
    if not shards:
        raise DataError(f"data path {url!r} has no files. Training needs text: choose another path.")
    return Found(url, shards, {}, ())


def _version(info: Mapping[str, object]) -> str:
    """What changes with a remote file: its modification time or entity tag, where the file system has one."""
    return blake2b(repr(sorted(info.items())).encode(), digest_size=8).hexdigest()


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"data directory {error.filename}: {error.strerror}. Make it readable, or choose another."
        ) from None

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)
