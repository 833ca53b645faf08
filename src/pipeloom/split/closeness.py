"""Whether results that are computed in two ways are equal, up to rounding."""

import torch
from torch import Tensor

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative; of shorter formats 0.05


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two floating-point tensors are equal, up to rounding of their format."""
    if found.shape != expected.shape or not found.numel():
        return found.shape == expected.shape
    tolerance = _TOLERANCE.get(found.dtype, 0.05)
    bound = tolerance * float(expected.abs().nan_to_num(posinf=0).max())
    return torch.allclose(found.double(), expected.double(), rtol=tolerance, atol=bound, equal_nan=True)
