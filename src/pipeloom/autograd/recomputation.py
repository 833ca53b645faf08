"""Recomputation: a stage's forward keeps less for its backward, which computes the rest again (arXiv:2205.05198).

    full        every block keeps its input        B or I runs the block's forward again, then its backward
    selective   attention keeps q, k, v            B or I computes scores, softmax and result again

Both are torch's non-reentrant checkpointing, which gives the forward's random numbers and autocast to the recomputation
and which split backwards know (one recomputation for I and W, see `split_backward`). Selective is a checkpoint around
each call of attention, found by a mode for torch's functions. torch's own way to be selective, a policy over all
operations of a block, keeps the result of every operation that is not recomputed, needed or not.

A recomputation runs under the weights of its forward (a stream installs the version before a backward), in the slice
of its forward (`in_slice`), and changes no buffer: running statistics are put back, other changes are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from pipeloom.errors import RunError
from pipeloom.ir.recompute import Recompute
from pipeloom.slicing.attention import attention_core
from pipeloom.split.module import StageModule, is_plain_sequential, run_blocks
from pipeloom.split.profile import may_change_input
from pipeloom.transport.values import Value, copied

# `attention_core` is what `causal_attention` runs in slices; torch's own module comes with its projections.
_ATTENTION = frozenset({F.scaled_dot_product_attention, F.multi_head_attention_forward, attention_core})

_Norm = nn.modules.batchnorm._NormBase  # its buffers are statistics, on which no result in training depends


def recomputed(module: nn.Module, recompute: Recompute) -> Callable[[Value], Value]:
    """What F calls in place of a stage.

    Args:
        module: the stage. Of one that `split` made, and of an nn.Sequential, the blocks are known; any other is one.
        recompute: what its backward computes again.
    """
    if recompute is Recompute.NONE:
        return module
    runner = _Full(module) if recompute is Recompute.FULL else _Selective(module)
    if isinstance(module, StageModule):
        return partial(module, run=runner)
    if is_plain_sequential(module):
        return lambda value: run_blocks(*_layers_of(module), value, runner)
    return lambda value: runner([module], module, value)


def _layers_of(module: nn.Module) -> tuple[list[nn.Module], list[bool]]:
    """The layers of an nn.Sequential at this moment, all of them blocks."""
    layers = list(module.children())
    return layers, [True] * len(layers)


class _Block(NamedTuple):
    """What is known of a block after its first forward."""

    modules: list[nn.Module]
    contexts: Callable[[], tuple[Any, Any]]
    works_in_place: bool


class _Full:
    """Runs blocks under checkpointing."""

    def __init__(self, stage: nn.Module) -> None:
        self._stage = stage
        self._blocks: dict[int, _Block] = {}

    def __call__(self, modules: Sequence[nn.Module], block: Callable[..., Value], *args: Any, **settings: Any) -> Value:
        if not torch.is_grad_enabled():
            return block(*args, **settings)
        known = self._blocks.get(id(modules[0]))
        if known is not None:
            return _checkpointed(known, block, *args, **settings)
        known = _describe(modules)
        before = _buffer_states(modules)
        result = _checkpointed(known, block, *args, **settings)
        for name, buffer, version in before:
            if buffer._version != version:
                raise RunError(
                    f"module {name_of(self._stage, modules[0])} changes its buffer {name!r} in a forward: a "
                    "recomputation would begin with other values; train this stage with recompute 'none'"
                )
        self._blocks[id(modules[0])] = known
        return result


def _describe(modules: Sequence[nn.Module]) -> _Block:
    norms = [part for module in modules for part in module.modules() if isinstance(part, _Norm)]
    contexts = partial(_contexts, norms) if norms else noop_context_fn
    return _Block(list(modules), contexts, any(map(may_change_input, modules)))


def _checkpointed(known: _Block, block: Callable[..., Value], *args: Any, **settings: Any) -> Value:
    function = partial(_on_copy, block) if known.works_in_place else block
    return checkpoint(function, *args, use_reentrant=False, context_fn=known.contexts, **settings)


class _Selective(TorchFunctionMode):
    """Runs blocks with every call of attention under checkpointing."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self._stage = stage
        self._found = False

    def __call__(self, modules: Sequence[nn.Module], block: Callable[..., Value], *args: Any, **settings: Any) -> Value:
        if not torch.is_grad_enabled():
            return block(*args, **settings)
        with self:
            result = block(*args, **settings)
        if not self._found:
            raise RunError(
                f"module {name_of(self._stage, modules[0])} calls no attention that can be recomputed "
                "(F.scaled_dot_product_attention, nn.MultiheadAttention, causal_attention): recompute 'selective' is "
                "for those; take 'full' or 'none' for this stage"
            )
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ATTENTION:
            return func(*args, **(kwargs or {}))
        self._found = True
        return checkpoint(partial(func, **(kwargs or {})), *args, use_reentrant=False)


def _on_copy(block: Callable[..., Value], value: Value, **settings: Any) -> Value:
    """Run a block that works in place: what it is given is still needed."""
    return block(copied(value), **settings)


class _KeptStatistics:
    """While a block is recomputed: its running statistics have seen the batch already."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._norms = norms
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._before = [(buffer, buffer.clone()) for norm in self._norms for buffer in norm.buffers(recurse=False)]

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for buffer, value in self._before:
                buffer.copy_(value)
        self._before = []


def _contexts(norms: Sequence[nn.Module]) -> tuple[Any, Any]:
    return nullcontext(), _KeptStatistics(norms)


def _buffer_states(modules: Sequence[nn.Module]) -> list[tuple[str, Tensor, int]]:
    """Names and versions of the buffers that a forward must not change."""
    return [
        (name, buffer, buffer._version)
        for module in modules
        for part in module.modules()
        if not isinstance(part, _Norm)
        for name, buffer in part.named_buffers(recurse=False)
    ]


def name_of(stage: nn.Module, module: nn.Module) -> str:
    """A module of a stage, for people."""
    name = next((name for name, part in stage.named_modules() if part is module), "")
    return f"{name or 'stage'!r} ({type(module).__name__})"
