"""Which models may run on slices of a sequence."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from pipeloom.errors import InputError
from pipeloom.slicing.dropout import TokenDropout

# Modules that compute every token of [batch, tokens, ...] by itself.
_PER_TOKEN: tuple[type[nn.Module], ...] = (
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout, TokenDropout, nn.Softmax),
    *(nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Threshold),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink),
)
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, CheckpointWrapper)
_REASONS: tuple[tuple[tuple[type[nn.Module], ...], str], ...] = (
    ((nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LocalResponseNorm), "normalises over several tokens"),
    ((nn.modules.conv._ConvNd,), "is a convolution along the sequence"),
    ((nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer), "attends to the whole sequence"),
    ((nn.RNNBase,), "starts anew in every slice"),
)


def make_sliceable(module: nn.Module) -> None:
    """Prepare a stage for slices: its dropouts become ones whose masks do not depend on how a sequence is cut.

    A module passes that is one of torch's that treat tokens one by one, or that declares itself with a true attribute
    ``sliceable`` (of its class or its own): it treats tokens one by one or asks `current_slice` what came before. This
    is about the module itself; those inside of it are checked too. ``sliceable`` may also be text: why not.
    A module with a method ``prepare_slicing()`` has it called first. Calling twice does nothing more.

    Raises:
        InputError: a module that does not pass; it is named.
    """
    for part in list(module.modules()):
        prepare = getattr(part, "prepare_slicing", None)
        if callable(prepare):
            prepare()
    for name, part in module.named_modules():
        reason = _refusal(part)
        if reason:
            raise InputError(
                f"module {name or 'model'!r} ({type(part).__name__}) {reason}: slices need modules that treat tokens "
                "one by one, or causal_attention; train without slices, or declare sliceable = True in it if it does"
            )
    replaced: dict[int, nn.Module] = {}
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if type(child) is nn.Dropout:
                if id(child) not in replaced:
                    replaced[id(child)] = TokenDropout(child.p).train(child.training)
                part._modules[name] = replaced[id(child)]


def _refusal(module: nn.Module) -> str:
    """Why a module cannot be sliced; empty if it can."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "is compiled, and compiled code does not know of slices"
    declared: Any = getattr(module, "sliceable", None)
    if declared is not None:
        return declared if isinstance(declared, str) else "" if declared else "says that it is not sliceable"
    forward: Any = type(module).forward
    kinds: tuple[Any, ...] = (*_PER_TOKEN, *_CONTAINERS)
    if any(isinstance(module, kind) and forward is kind.forward for kind in kinds):
        return _setting(module)
    for refused, reason in _REASONS:
        if isinstance(module, refused):
            return reason
    return "is not known to treat tokens one by one"


def _setting(module: nn.Module) -> str:
    """What a module's settings make of it."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    if isinstance(module, nn.Softmax) and module.dim != -1:
        return f"normalises over dimension {module.dim}"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "changes its weight in every forward"
    return ""
