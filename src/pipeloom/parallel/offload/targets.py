"""The offload options of a user: where to offload, and which activations. No torch here."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.passes import insert_offload
from pipeloom.passes.offload import least_held

CPU, DISK = "cpu", "disk"


@dataclass(frozen=True, slots=True)
class OffloadTarget:
    """Memory other than the device's, to which a rank offloads.

    Attributes:
        kind: "cpu" (host memory) or "disk" (a file).
        directory: of the file, for "disk".
    """

    kind: str
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> OffloadTarget:
        """The target that "cpu" or "disk:PATH" names.

        Raises:
            InputError: another text, or a directory that is not writable.
        """
        kind, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
        if (kind, path) == (CPU, ""):
            return cls(CPU)
        if kind != DISK or not path:
            raise InputError(f"offload={text!r}: must be `cpu`, or `disk:PATH` with a writable directory.")
        directory = Path(path)
        try:
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise InputError(
                f"offload={text}: no file can be created in {directory} ({error.strerror}). Name a writable directory."
            ) from error
        return cls(DISK, directory)

    def __str__(self) -> str:
        return self.kind if self.directory is None else f"{self.kind}:{self.directory}"


@dataclass(frozen=True, slots=True)
class OffloadActivations:
    """Offload of activations between their forward and their backward; see `pipeloom.passes.insert_offload`.

    Attributes:
        where: the offload target, "cpu" or "disk:PATH".
        most: activations that a rank may hold, one number or one per rank. None: as few as possible.
        beside: number of computations that one transfer overlaps.
        least_bytes: tensors below this size are not offloaded.

    Raises:
        InputError: `where` is not an offload target, or its directory is not writable.
    """

    where: str
    most: float | Sequence[float] | None = None
    beside: int = 1
    least_bytes: int = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("beside", "least_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 0.")
        OffloadTarget.parse(self.where)

    def insert(self, program: Program) -> Program:
        """The program with OFFLOAD and RELOAD actions.

        Raises:
            InputError: the cap is too small, or the schedule is asynchronous.
        """
        if program.schedule.microbatches_per_update is not None:
            raise InputError(
                f"schedule {program.name!r}: activation offload needs a synchronous schedule, because the weight "
                "versions of an asynchronous one stay in memory. Use one that flushes, such as `1f1b`."
            )
        most = least_held(program, beside=self.beside) if self.most is None else self.most
        return insert_offload(program, most, beside=self.beside)
