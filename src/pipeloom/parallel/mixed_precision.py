"""Number formats of parameters and gradients, and the optimizer step that widens 16-bit gradients."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from pipeloom.parallel.options import Precision

# The formats that need float32 master parameters, by name.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Norm = nn.modules.batchnorm._NormBase
_GROUP_ELEMENTS = 2**22


@dataclass(frozen=True)
class NumberFormats:
    """The number formats of one unit.

    Attributes:
        compute: of the parameters that forward and backward read.
        main: of the parameters that the optimizer updates.
        gradient: of the gradient sum over micro-batches and replicas.
    """

    compute: torch.dtype
    main: torch.dtype
    gradient: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype, precision: Precision, *, keeps_dtype: bool) -> Self:
        """The formats of parameters that the model has in `dtype`; with `keeps_dtype` all three are `dtype`."""
        if keeps_dtype or not precision.has_masters or not dtype.is_floating_point:
            return cls(dtype, dtype, dtype)
        compute, main = DTYPES[precision.dtype], torch.promote_types(dtype, torch.float32)
        return cls(compute, main, compute if precision.gradients == "same" else main)


def with_statistics(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    """Parameters of batch norms. They keep their format: it must be the format of the running statistics."""
    norms = (part for module in modules for part in module.modules() if isinstance(part, _Norm))
    return {parameter for norm in norms for parameter in norm.parameters(False)}


def cast_tables(stages: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Cast non-persistent buffers, such as tables of rotary positions, to `dtype`.

    Those of transformers stay: rotary frequencies, of which positions are multiples, are float32 there in any format.
    """
    for stage in stages:
        for module in stage.modules():
            if type(module).__module__.startswith("transformers."):
                continue
            for name in module._non_persistent_buffers_set:
                buffer = module._buffers[name]
                if buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(dtype)


def update_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Call ``optimizer.step()``, also where gradients have 16 bits and master parameters 32 (see `pipeloom.Precision`).

    torch's optimizers need parameters and gradients in one format. To avoid a float32 copy of all gradients at once,
    the parameters are updated in groups of about `_GROUP_ELEMENTS` elements. Hooks on the optimizer's step run once per
    group. `pipeloom.OffloadedOptimizer` has its own groups and widens the gradients itself.
    """
    given = [(p, p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    narrow = [(parameter, gradient) for parameter, gradient in given if gradient.dtype != parameter.dtype]
    if not narrow or getattr(optimizer, "widens_gradients", False):
        optimizer.step()
        return
    same = [(parameter, gradient) for parameter, gradient in given if gradient.dtype == parameter.dtype]
    groups: list[list[tuple[nn.Parameter, Tensor]]] = [same] if same else []
    size = _GROUP_ELEMENTS
    for parameter, gradient in narrow:
        if size >= _GROUP_ELEMENTS:
            groups.append([])
            size = 0
        groups[-1].append((parameter, gradient))
        size += gradient.numel()
    for parameter, _ in given:
        parameter.grad = None
    for group in groups:
        for parameter, gradient in group:
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        for parameter, _ in group:
            parameter.grad = None
    for parameter, gradient in given:
        parameter.grad = gradient
