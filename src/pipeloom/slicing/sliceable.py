"""Checks that a model gives the same result on slices, or on context-parallel ranks, as on the full sequence."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pipeloom.errors import InputError
from pipeloom.slicing.attention import TokenDropout
from pipeloom.slicing.context import Slice
from pipeloom.slicing.tokens import Tokens, current_part

# Modules that process each token of [batch, tokens, ...] independently.
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
    ((nn.RNNBase,), "would restart in every slice"),
)
_DIFFERS = "so its result on parts of a sequence would differ"
_WITHOUT = "Train on whole sequences."
_REPLACE = "Replace it, or train on whole sequences."
_DECLARE = (
    "If it processes each token independently or uses pipeloom.slicing.causal_attention, set `sliceable = True` on it. "
    "Otherwise train on whole sequences."
)


def keeps_slices(module: nn.Module) -> bool:
    """Whether a stage supports slices as it is, without `make_sliceable`."""
    kinds = (*_PER_TOKEN, *_CONTAINERS)
    return all(getattr(part, "sliceable", None) is True or type(part) in kinds for part in module.modules())


def make_sliceable(module: nn.Module, *, context: bool = False) -> None:
    """Check that a stage supports slices and context parallelism. Replace ``nn.Dropout`` by `TokenDropout`. Idempotent.

    A module supports both if it is one of torch's modules that process tokens independently, or if its attribute
    ``sliceable`` is true, which declares that its forward processes tokens independently or uses `attention`,
    `position_rows` or, for slices alone, `current_slice`. A class that overrides forward has to declare ``sliceable``
    again. The declaration does not cover submodules, which are checked too. ``sliceable`` may also be a string with the
    reason why the module does not support parts of a sequence.

    If a module has a method ``prepare_slicing()``, it is called before the check; with `context`, then
    ``prepare_context()``, too.

    Args:
        module: the stage.
        context: whether ranks share the sequences, in place of slices.

    Raises:
        InputError: a module does not support parts of a sequence; the message has its name and the reason.
    """
    for part in list(module.modules()):
        for method in ("prepare_slicing", "prepare_context") if context else ("prepare_slicing",):
            prepare = getattr(part, method, None)
            if callable(prepare):
                prepare()
    for name, part in module.named_modules():
        refusal = _refusal(part)
        if refusal is not None:
            reason, fix = refusal
            raise InputError(f"module {name or 'model'!r} ({type(part).__name__}) {reason}. {fix}")
    replaced: dict[int, nn.Module] = {}
    for part in list(module.modules()):
        for name, child in part._modules.items():
            if type(child) is nn.Dropout:
                if id(child) not in replaced:
                    replaced[id(child)] = TokenDropout(child.p).train(child.training)
                part._modules[name] = replaced[id(child)]


def _refusal(module: nn.Module) -> tuple[str, str] | None:
    """Why a module does not support parts of a sequence, as a predicate, and the fix; None if it does."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return (
            "is compiled, which parts of a sequence do not support",
            "Pass the module without torch.compile, or train on whole sequences.",
        )
    declared: Any = getattr(module, "sliceable", None)
    if isinstance(declared, str) or (declared is not None and not declared):
        return declared or "declares sliceable = False", _WITHOUT
    # Set on the module, or by the class that defines its forward or a subclass of that.
    classes = (names for names in map(vars, type(module).__mro__) if {"sliceable", "forward"} & names.keys())
    if declared and ("sliceable" in vars(module) or "sliceable" in next(classes, {})):
        return None
    if "forward" in vars(module):
        return "has a forward set on the instance", _DECLARE
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        # Weight reparametrizations of torch (spectral_norm, prune) and observers of transformers mix none.
        if not (getattr(hook, "__module__", None) or "").startswith(("torch.nn.utils.", "transformers.")):
            return "has forward hooks, which may mix tokens", _DECLARE
    forward: Any = type(module).forward
    kinds: tuple[Any, ...] = (*_PER_TOKEN, *_CONTAINERS)
    if any(isinstance(module, kind) and forward is kind.forward for kind in kinds):
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and len(module.normalized_shape) > 1:
            return f"normalises over {len(module.normalized_shape)} dimensions, {_DIFFERS}", _REPLACE
        if isinstance(module, nn.Softmax) and module.dim != -1:
            return f"normalises over dimension {module.dim}, {_DIFFERS}", _REPLACE
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            return "changes its weight in every forward (max_norm)", "Use max_norm=None, or train on whole sequences."
        return None
    for refused, reason in _REASONS:
        if isinstance(module, refused):
            return f"{reason}, {_DIFFERS}", _REPLACE
    if declared:
        return "overrides the forward of the class that declares sliceable", _DECLARE
    return "is not known to process tokens independently", _DECLARE


class RefuseRawAttention(TorchFunctionMode):
    """Raises if a module calls ``F.scaled_dot_product_attention`` on the tokens of one slice or rank only.

    In a later slice, such a call misses the keys of earlier slices: it has as many keys as the slice has tokens, while
    `attention` has those of the sequence so far. Under context parallelism it misses those of other ranks. The mode
    adds a Python call to each torch function, so use it only for the first micro-batch.

    Args:
        model: the model whose modules run, for their names in messages.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query, key = (kwargs[name] if name in kwargs else args[i] for i, name in enumerate(("query", "key")))
            part, size = current_part(), query.shape[-2] if query.shape[-2] == key.shape[-2] else 0
            if isinstance(part, Slice) and part.start > 0 and size == part.end - part.start:
                raise InputError(self._refusal("one slice", "the earlier slices", "causal_attention"))
            if isinstance(part, Tokens) and size == part.num_held < part.length:
                raise InputError(self._refusal("one context-parallel rank", "those of the other ranks", "attention"))
        return func(*args, **kwargs)

    def _refusal(self, whose: str, missed: str, fix: str) -> str:
        return (
            f"module {self._caller(3)} calls F.scaled_dot_product_attention on the tokens of {whose}, which misses "
            f"{missed}. Use pipeloom.slicing.{fix}."
        )

    def _caller(self, depth: int) -> str:
        """The name of the innermost module on the call stack."""
        frame = sys._getframe(depth)
        names = {id(module): name for name, module in self._model.named_modules()}
        while frame.f_back is not None:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
            if isinstance(owner, nn.Module):
                return f"{names.get(id(owner)) or 'model'!r} ({type(owner).__name__})"
            frame = frame.f_back
        return "'model'"
