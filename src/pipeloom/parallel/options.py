"""What a user says about copies of a pipeline and about number formats. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity
from pipeloom.parallel.offload.targets import OffloadTarget

Layout = Literal["elements", "parameters"]
DType = Literal["fp32", "bf16", "fp16"]
GradientDType = Literal["float32", "same"]

# Of `DataParallel.bucket_bytes`, as torch's DDP has it: what a few messages carry of a large model. Smaller ones were
# no faster where they were measured (see docs/how-to/data-parallel.md).
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True, slots=True)
class DataParallel:
    """How copies of a pipeline share parameters, gradients and optimizer states; see `pipeloom.ir.DataStrategy`.

    Attributes:
        strategy: ddp, parameter-server, zero1, zero2 or zero3.
        granularity: step, chunk or microbatch: how often zero3 gathers parameters, and zero2 and zero3 share
            gradients. None: step.
        layout: of what a copy keeps of a bucket's parameters: "elements", an equal piece of all of them one behind the
            other, or "parameters", whole ones, for optimizers that need whole matrices.
        bucket_bytes: neighbouring parameters of a stage are gathered and reduced together until they have so many
            bytes in the format of forwards; 0: each by itself, or each layer where layers are not cut (granularity
            microbatch, layout "parameters"). Checkpoints do not depend on it.
        offload: "cpu" or "disk:PATH": where main parameters (zero3's, and masters of 16-bit formats) are while they
            are neither gathered nor updated. `pipeloom.OffloadedOptimizer` updates them there. None: in memory.

    Raises:
        InputError: an unknown name, a granularity that the strategy does not have, negative bytes, or a place in
            which no file can be made.
    """

    strategy: str = "ddp"
    granularity: str | None = None
    layout: Layout = "elements"
    bucket_bytes: int = BUCKET_BYTES
    offload: str | None = None

    def __post_init__(self) -> None:
        _one_of("data strategy", self.strategy, [strategy.value for strategy in DataStrategy])
        _one_of("layout", self.layout, get_args(Layout))
        if self.granularity is not None:
            _one_of("granularity", self.granularity, [granularity.value for granularity in Granularity])
        if not isinstance(self.bucket_bytes, int) or self.bucket_bytes < 0:
            raise InputError(
                f"bucket_bytes is {self.bucket_bytes!r}: a whole number of bytes, 0 or more; correct or omit it"
            )
        self.axis(1)
        if self.offload is not None:
            OffloadTarget.parse(self.offload)

    @classmethod
    def of(cls, given: DataParallel | str | None) -> DataParallel:
        """Options, the name of a strategy, or None for the default."""
        return given if isinstance(given, cls) else cls() if given is None else cls(str(given))

    def axis(self, degree: int, *, separate_master: bool = False) -> DataAxis:
        """The data axis of a program of `degree` copies."""
        return DataAxis(
            degree=degree,
            strategy=DataStrategy(self.strategy),
            granularity=Granularity(self.granularity or Granularity.STEP),
            separate_master=separate_master,
        )


@dataclass(frozen=True, slots=True)
class Precision:
    """In which format a pipeline computes, and in which it adds up gradients. Updates are always of float32 numbers.

    Attributes:
        dtype: fp32, bf16 or fp16: of parameters in forwards and backwards, and so of messages. With the last two the
            optimizer has float32 copies of the parameters, its masters.
        gradients: float32, or "same" as the parameters in the backwards: micro-batches add up with fewer bits in half
            the memory.

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
                "precision fp16 with gradients 'same': sums of many small gradients leave its range; take bf16, or "
                "gradients 'float32'"
            )

    @classmethod
    def of(cls, given: Precision | str | None) -> Precision:
        """Options, the name of a format, or None for the default."""
        return given if isinstance(given, cls) else cls() if given is None else cls(given)  # type: ignore[arg-type]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer's parameters are other numbers than the forwards read."""
        return self.dtype != "fp32"


def axis_of(data: DataParallel, precision: Precision, degree: int) -> DataAxis | None:
    """How `degree` copies share the work; None where one runs alone with its own parameters.

    Raises:
        InputError: parameters are to be offloaded that every forward reads.
    """
    if data.offload is not None and data.strategy != "zero3" and not precision.has_masters:
        raise InputError(
            f"offload of parameters with {data.strategy} in {precision.dtype}: forwards read what the optimizer "
            "updates; take zero3, which gathers them, or bf16 or fp16, which have masters, or leave it out"
        )
    if degree == 1 and data.strategy == "ddp" and not precision.has_masters:
        return None
    return data.axis(degree, separate_master=precision.has_masters)


def _one_of(what: str, given: str, known: list[str] | tuple[str, ...]) -> None:
    if given not in known:
        raise InputError(f"{what} {given!r} is unknown: it is one of {', '.join(known)}; take one of them")
