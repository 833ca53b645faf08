"""Which checkpoint a run resumes from: the newest good one, and what becomes of damaged ones. Needs no torch."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pipeloom.common.atomic_directory import fsync_directory
from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.errors import CheckpointError
from pipeloom.train.checkpoint.directory import OWN_CHECKPOINT, checkpoints, resolve
from pipeloom.train.checkpoint.manifest import Manifest, is_misnamed, verify


class Resumed(NamedTuple):
    """A checkpoint of which every byte was compared, and lines to show about those passed over."""

    path: Path
    manifest: Manifest
    notices: list[str]


def find_good(wanted: str | None, output_dir: Path, *, leads: bool, key: CheckpointKey | None = None) -> Resumed | None:
    """The checkpoint to resume from, as option ``resume_from_checkpoint`` says; None: the run starts anew.

    `auto` passes over damaged checkpoints if there is a good one before them; they are kept under other names.

    Args:
        wanted: a checkpoint or the output directory of a run, `latest`, `auto` or None.
        output_dir: of this run.
        leads: whether this process renames the damaged ones, for all.
        key: with which checkpoints are signed; one without its signature counts as damaged.

    Raises:
        CheckpointError: it is damaged; the message names the newest good one, if there is one. Or `latest` finds none.
    """
    if wanted is None:
        return None
    if wanted not in OWN_CHECKPOINT:
        path = resolve(Path(wanted))
        return Resumed(path, verify(path, key), [])
    found, damaged, first = None, list[tuple[Path, str]](), None
    for path in checkpoints(output_dir):
        try:
            found = Resumed(path, _own(path, key), [])
            break
        except CheckpointError as error:
            damaged.append((path, str(error)))
            first = first or error
    if first is None:
        if found is None and wanted == "latest":
            raise CheckpointError(
                f"resume_from_checkpoint=latest: {output_dir} has no finished checkpoint. Use auto to start a run, or "
                "name another output_dir."
            )
        return found
    if found is None:
        others = f" None of the {len(damaged)} checkpoints in {output_dir} can be used." if len(damaged) > 1 else ""
        raise CheckpointError(f"{first}{others} To start anew, name another output_dir.") from first
    if wanted == "latest":
        raise CheckpointError(
            f"{first} The newest good one: --resume_from_checkpoint {found.path}; auto takes it by itself."
        ) from first
    for path, reason in damaged:
        kept = _set_aside(path) if leads else path
        found.notices.append(f"{reason} It is passed over for {found.path.name}, and kept as {kept.name}.")
    return found


def _own(path: Path, key: CheckpointKey | None) -> Manifest:
    """The manifest of a checkpoint that the run wrote under this name. Raises CheckpointError."""
    manifest = verify(path, key)
    if is_misnamed(path, manifest.step):
        raise CheckpointError(
            f"{path} is the checkpoint of step {manifest.step}: it was copied or renamed. Name it "
            f"checkpoint-{manifest.step}, or remove it."
        )
    return manifest


def _set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name that no run resumes from."""
    names: Iterator[Path] = (path.with_name(f"{path.name}.damaged{n or ''}") for n in range(1_000_000))
    kept = next(name for name in names if not os.path.lexists(name))
    with suppress(FileNotFoundError):
        os.rename(path, kept)
        fsync_directory(path.parent)
    return kept
