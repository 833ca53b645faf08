"""`DataParallel` and `Precision`: the user's options for data parallelism and number formats. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, DataStrategy, Granularity
from pipeloom.parallel.offload.targets import OffloadTarget

Layout = Literal["elements", "parameters"]
DType = Literal["fp32", "bf16", "fp16"]
GradientDType = Literal["float32", "same"]

# Default of `DataParallel.bucket_bytes`, as in torch's DDP: few messages for a large model. Smaller buckets were no
# faster in measurements (see docs/how-to/data-parallel.md).
BUCKET_BYTES = 25 << 20


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
    def of(cls, given: DataParallel | str | None) -> DataParallel:
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
    def of(cls, given: Precision | str | None) -> Precision:
        """Options, the name of a format, or None for the default."""
        return given if isinstance(given, cls) else cls() if given is None else cls(given)  # type: ignore[arg-type]

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates master parameters, in another format than forwards read."""
        return self.dtype != "fp32"


def axis_of(data: DataParallel, precision: Precision, degree: int) -> DataAxis | None:
    """The data axis of `degree` replicas; None for a single pipeline without masters.

    Raises:
        InputError: every forward reads the parameters to offload.
    """
    if data.offload is not None and not data.kind.shards_parameters and not precision.has_masters:
        raise InputError(
            f"offload={data.offload!r} with {data.strategy} in {precision.dtype}: forwards read the parameters that "
            "the optimizer updates, so they cannot be offloaded. Use zero3, or bf16 or fp16, or remove it."
        )
    if degree == 1 and not data.kind.shards_optimizer and not precision.has_masters:
        return None
    return data.axis(degree, separate_master=precision.has_masters)


def _one_of(what: str, given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise InputError(f"{what}={given!r}: unknown. Use one of {', '.join(known)}.")
