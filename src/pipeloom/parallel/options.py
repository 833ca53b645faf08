"""The user's options for data parallelism, number formats and offload. No torch here."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, get_args

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity, Program, Schedule
from pipeloom.passes import insert_offload
from pipeloom.passes.offload import least_held

Layout = Literal["elements", "parameters"]
DType = Literal["fp32", "bf16", "fp16"]
GradientDType = Literal["float32", "same"]

# Default of `DataParallel.bucket_bytes`, as in torch's DDP: few messages for a large model. Smaller buckets were no
# faster in measurements (see docs/how-to/data-parallel.md).
BUCKET_BYTES = 25 << 20

CPU, DISK = "cpu", "disk"  # offload targets


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
    def parse(cls, text: str) -> Self:
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

    def check_device(self, device: str, option: str, what: str) -> None:
        """Raises InputError for an `option` that offloads `what` of a model to the memory of its own kind of device."""
        if self.kind == device:
            raise InputError(
                f"{option}: the {what} of a model on the CPU are in host memory already. Move the model to the GPU "
                "first, use 'disk:PATH', or do not offload."
            )

    def __str__(self) -> str:
        return self.kind if self.directory is None else f"{self.kind}:{self.directory}"


@dataclass(frozen=True, slots=True)
class DataParallel:
    """What data-parallel replicas shard of parameters, gradients and optimizer states (`pipeloom.ir.DataStrategy`).

    Attributes:
        strategy: ddp, parameter-server, zero1, zero2 or zero3.
        granularity: step, chunk or microbatch: how often zero3 gathers parameters, and zero2 and zero3 reduce
            gradients. None: step.
        layout: of the shards: "elements", an equal part of each bucket's elements per replica, or "parameters", where
            each replica owns full parameters, for optimizers that need full matrices.
        bucket_bytes: bytes, in the format of forwards, of neighbouring parameters that are gathered and reduced
            together. 0: each parameter alone, or each layer where layers are not cut (granularity microbatch, layout
            "parameters"). Checkpoints do not depend on it.
        offload: offload target, "cpu" or "disk:PATH", of main parameters (shards of zero3, masters of 16-bit formats)
            while they are neither gathered nor updated. `pipeloom.OffloadedOptimizer` updates them. None: no offload.

    Raises:
        InputError: an unknown name, a granularity that the strategy does not support, negative bytes, or an offload
            target that is not writable.
    """

    strategy: str = "ddp"
    granularity: str | None = None
    layout: Layout = "elements"
    bucket_bytes: int = BUCKET_BYTES
    offload: str | None = None

    def __post_init__(self) -> None:
        _one_of("data strategy", self.strategy, list(DataStrategy))
        _one_of("layout", self.layout, get_args(Layout))
        if self.granularity is not None:
            _one_of("granularity", self.granularity, list(Granularity))
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 0:
            raise InputError(f"bucket_bytes={self.bucket_bytes!r}: must be an integer number of bytes, at least 0.")
        self.axis(1)
        if self.offload is not None:
            OffloadTarget.parse(self.offload)

    @classmethod
    def of(cls, given: Self | str | None) -> Self:
        """Options, the name of a strategy, or None for the default."""
        return given if isinstance(given, cls) else cls() if given is None else cls(str(given))

    @property
    def kind(self) -> DataStrategy:
        """`strategy` as a member of the enum."""
        return DataStrategy(self.strategy)

    def axis(self, degree: int, *, separate_master: bool = False) -> DataAxis:
        """The data axis of a program with `degree` replicas."""
        return DataAxis(
            degree=degree,
            strategy=self.kind,
            granularity=Granularity(self.granularity or Granularity.STEP),
            separate_master=separate_master,
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of forward and backward, and of gradient sums. The optimizer always updates float32 parameters.

    Attributes:
        dtype: fp32, bf16 or fp16: of parameters in forward and backward, and so of messages. With bf16 and fp16 the
            optimizer updates float32 master parameters.
        gradients: format of the gradient sum over micro-batches: float32, or "same" as `dtype`, which halves its memory
            and loses precision.

    Raises:
        InputError: an unknown name, or fp16 with gradients "same".
    """

    dtype: DType = "fp32"
    gradients: GradientDType = "float32"

    def __post_init__(self) -> None:
        _one_of("precision", self.dtype, get_args(DType))
        _one_of("format of gradients", self.gradients, get_args(GradientDType))
        if self.dtype == "fp16" and self.gradients == "same":
            raise InputError(
                "precision fp16 with gradients 'same': gradient sums leave its range. Use bf16, or gradients 'float32'."
            )

    @classmethod
    def of(cls, given: Self | str | None) -> Self:
        """Options, the name of a format, or None for the default."""
        return given if isinstance(given, cls) else cls() if given is None else cls(given)  # type: ignore[arg-type]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates master parameters, in another format than forwards read."""
        return self.dtype != "fp32"


def check_synchronous(schedule: Schedule, option: str) -> None:
    """Raises InputError for an asynchronous schedule with an `option` of data parallelism or number formats."""
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"{option}: does not work with asynchronous schedule {schedule.name!r}. Use a synchronous one such as "
            "1f1b, or replicas of stages for more processes."
        )


def axis_of(data: DataParallel, precision: Precision, degree: int) -> DataAxis | None:
    """The data axis of `degree` replicas; None for a single pipeline without masters.

    Raises:
        InputError: every forward reads the parameters to offload.
    """
    if data.offload is not None and not data.kind.shards_parameters and not precision.has_masters:
        raise InputError(
            f"offload={data.offload!r} with {data.strategy} in {precision.dtype}: forwards read the parameters that "
            "the optimizer updates, so they cannot be offloaded. Use zero3, bf16 or fp16, or remove offload."
        )
    if degree == 1 and not data.kind.shards_optimizer and not precision.has_masters:
        return None
    return data.axis(degree, separate_master=precision.has_masters)


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


def _one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise InputError(f"{what}={given!r}: unknown. Use one of {', '.join(known)}.")
