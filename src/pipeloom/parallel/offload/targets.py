"""Where things are offloaded to, in words; checked without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.passes import insert_offload
from pipeloom.passes.offload import least_held

if TYPE_CHECKING:
    import torch

    from pipeloom.engine.activation_mover import ActivationMover

CPU, DISK = "cpu", "disk"


@dataclass(frozen=True, slots=True)
class Place:
    """Another memory than the device's.

    Attributes:
        kind: "cpu", memory of the host, or "disk", a file.
        directory: where files are made, for "disk".
    """

    kind: str
    directory: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Place:
        """A place from its words.

        Raises:
            InputError: other words, or a directory in which no file can be made.
        """
        kind, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
        if (kind, path) == (CPU, ""):
            return cls(CPU)
        if kind != DISK or not path:
            raise InputError(f"offload is {text!r}: it is cpu, or disk:PATH, a directory for its files; correct it")
        directory = Path(path)
        try:
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise InputError(
                f"offload to {text}: no file can be made in {directory} ({error.strerror}); name a directory that is "
                "there and writable"
            ) from error
        return cls(DISK, directory)

    def __str__(self) -> str:
        return self.kind if self.directory is None else f"{self.kind}:{self.directory}"


@dataclass(frozen=True, slots=True)
class OffloadActivations:
    """Activations move away between their forward and their backward; see `pipeloom.passes.insert_offload`.

    Attributes:
        where: "cpu" or "disk:PATH".
        most: how many activations a rank may hold, one number or one a rank; None: as few as moves can keep.
        beside: beside how many computations a move runs.
        least_bytes: what is smaller stays where it is.

    Raises:
        InputError: `where` is no place, or one in which no file can be made.
    """

    where: str
    most: float | Sequence[float] | None = None
    beside: int = 1
    least_bytes: int = 4096

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("beside", "least_bytes"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}: it is 0 or more; raise it")
        Place.parse(self.where)

    def insert(self, program: Program) -> Program:
        """The program with its moves.

        Raises:
            InputError: the cap cannot be kept, or parameters change while the program runs.
        """
        if program.schedule.microbatches_per_update is not None:
            raise InputError(
                f"schedule {program.name!r} with offload of activations: a stream's versions would have to move too; "
                "take a schedule that flushes, such as 1f1b"
            )
        most = least_held(program, beside=self.beside) if self.most is None else self.most
        return insert_offload(program, most, beside=self.beside)

    def open(self, device: torch.device) -> Callable[[], ActivationMover]:
        """What makes the mover of each rank of this process; they share a store.

        Raises:
            InputError: activations are there already.
        """
        from pipeloom.parallel.offload.activations import MovedActivations
        from pipeloom.parallel.offload.store import open_store

        place = Place.parse(self.where)
        if place.kind == device.type:
            raise InputError(
                f"offload of activations to {self.where!r} of a model that is in the CPU's memory: nothing would move; "
                "take disk:PATH, or leave it out"
            )
        store = open_store(place)
        return lambda: MovedActivations(store, self.least_bytes)
