"""Which models may run on slices of a sequence."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipeloom.errors import InputError
from pipeloom.slicing.context import current_slice
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
    ``sliceable`` (its own, or of the class whose forward runs or one below it: a class that overrides forward declares
    anew): it treats tokens one by one or asks `current_slice` what came before. This is about the module itself; those
    inside of it are checked too. ``sliceable`` may also be text: why not.
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
    if isinstance(declared, str) or (declared is not None and not declared):
        return declared or "says that it is not sliceable"
    if declared and _declares(module):
        return ""
    if "forward" in vars(module):
        return "has a forward of its own in place of its class's"
    if any(not _harmless(hook) for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())):
        return "has forward hooks, which may look at several tokens"
    forward: Any = type(module).forward
    kinds: tuple[Any, ...] = (*_PER_TOKEN, *_CONTAINERS)
    if any(isinstance(module, kind) and forward is kind.forward for kind in kinds):
        return _setting(module)
    for refused, reason in _REASONS:
        if isinstance(module, refused):
            return reason
    return "overrides a forward that was declared" if declared else "is not known to treat tokens one by one"


def _declares(module: nn.Module) -> bool:
    """Whether ``sliceable`` is the module's own, or about its class's forward and not one that this overrides."""
    if "sliceable" in vars(module):
        return True
    for names in map(vars, type(module).__mro__):
        if "sliceable" in names:
            return True
        if "forward" in names:
            return False
    return False


def _harmless(hook: Any) -> bool:
    """Whether a hook is of torch's that compute weights (spectral_norm, prune), or of transformers' that record."""
    return (getattr(hook, "__module__", None) or "").startswith(("torch.nn.utils.", "transformers."))


def _setting(module: nn.Module) -> str:
    """What a module's settings make of it."""
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1:
        return f"normalises over {len(module.normalized_shape)} dimensions"
    if isinstance(module, nn.Softmax) and module.dim != -1:
        return f"normalises over dimension {module.dim}"
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return "changes its weight in every forward"
    return ""


class RefuseRawAttention(TorchFunctionMode):
    """Refuses attention among the tokens of a slice that leaves out those of the slices before it.

    It costs a Python call for each of torch's functions, so it is for the first time that slices run. The keys of
    `causal_attention` begin with the sequence; as many keys as the slice has tokens are the slice's alone.

    Args:
        model: whose modules run, for their names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        piece = current_slice()
        if func is F.scaled_dot_product_attention and piece is not None and piece.start > 0:
            query, key = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key")))
            if query.shape[-2] == key.shape[-2] == piece.end - piece.start:
                raise InputError(
                    f"module {self._caller()} attends with F.scaled_dot_product_attention to the tokens of its slice "
                    "alone: earlier slices count too; use pipeloom.slicing.causal_attention"
                )
        return func(*args, **kwargs)

    def _caller(self) -> str:
        """The innermost module whose method is running."""
        frame = sys._getframe(2)
        names = {id(module): name for name, module in self._model.named_modules()}
        while frame.f_back is not None:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
            if isinstance(owner, nn.Module):
                return f"{names.get(id(owner)) or 'model'!r} ({type(owner).__name__})"
            frame = frame.f_back
        return "'model'"
