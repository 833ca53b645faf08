"""Number formats of parameters: in which forwards read them, updates write them, and gradients add up."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipeloom.parallel.options import Precision

# The names of formats that need masters.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Formats:
    """Number formats of one unit.

    Attributes:
        compute: of forwards.
        main: of updates.
        gradient: in which micro-batches and copies add up.
    """

    compute: torch.dtype
    main: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, precision: Precision, *, stays: bool) -> Formats:
        """Of parameters that the model has in `dtype`, where it `stays` in all of them."""
        if stays or not precision.has_masters or not dtype.is_floating_point:
            return cls(dtype, dtype, dtype)
        compute, main = DTYPES[precision.dtype], torch.promote_types(dtype, torch.float32)
        return cls(compute, main, compute if precision.gradients == "same" else main)
