"""Whether the gradient of a loss for some samples is that of the loss of all: values alone may hide that it is not.

The value of ``loss / loss.detach()`` is 1 for any samples, and so is the mean of the values of its halves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_NEAR, _NUM_EPS = 1e-3, 20  # between gradients that are equal: relative to their norm, and in units of the rounding

Gradients = list[Tensor | None]
"""Of a loss, with respect to values [samples, ...]; None: it does not depend on the value."""


def gradients_of(loss: Tensor, values: Sequence[Tensor]) -> Gradients:
    """The gradients of a loss with respect to values; it keeps its graph."""
    asked = [each for each in values if each.requires_grad]
    if not asked or loss.grad_fn is None:
        return [None] * len(values)
    found = iter(torch.autograd.grad(loss, asked, allow_unused=True, retain_graph=True))
    return [next(found) if each.requires_grad else None for each in values]


@torch.no_grad()
def gradients_combine(whole: Gradients, parts: Sequence[Gradients], weights: Sequence[float]) -> bool:
    """Whether the gradients of a loss are those of the losses of its samples' parts with these weights.

    Args:
        whole, parts: gradients with respect to values of all samples, and of consecutive parts of them.
        weights: of the losses of the parts.
    """
    for gradient, *of_parts in zip(whole, *parts, strict=True):
        if gradient is None or any(each is None for each in of_parts):
            continue
        pairs = zip(of_parts, weights, strict=True)
        combined = torch.cat([each * weight for each, weight in pairs if each is not None])
        near = max(_NEAR, _NUM_EPS * torch.finfo(gradient.dtype).eps) * float(gradient.double().norm())
        if bool(gradient.isfinite().all()) and float((combined.double() - gradient.double()).norm()) > near:
            return False
    return True
