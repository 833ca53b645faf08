"""Activation recomputation: a forward saves less, and the backward computes the rest again (arXiv:2205.05198).

    full        every block saves its input        B or I runs the block's forward again, then its backward
    selective   attention saves q, k, v            B or I computes scores, softmax and result again

Both use torch's non-reentrant checkpointing, which restores the forward's random state and autocast for the
recomputation; for blocks, `RepeatedDraws` restores Python's and numpy's random states. Split backwards support it: one
recomputation serves I and W (see `split_backward`). "selective" checkpoints each call of attention, which a mode for
torch's functions finds. torch's own selective checkpointing is a policy over all operations of a block; it saves the
result of every operation that it does not recompute, needed or not.

A recomputation runs with the weights of its forward (a stream installs the version before a backward) and in the slice
of its forward (`in_slice`). It changes no buffer: running statistics are restored, other changes raise.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from pipeloom.autograd.repeated_draws import RepeatedDraws
from pipeloom.common.random_states import thread
from pipeloom.errors import RunError
from pipeloom.ir.recompute import Recompute
from pipeloom.slicing.attention import attention_core, context_attention
from pipeloom.split.stage_module import StageModule, is_plain_sequential, may_change_input, run_blocks
from pipeloom.transport.values import Value, copied

# `attention` runs `attention_core` in slices and `context_attention` under context parallelism; torch's own module
# comes with its projections.
_ATTENTION = frozenset(
    {F.scaled_dot_product_attention, F.multi_head_attention_forward, attention_core, context_attention}
)

_Norm = nn.modules.batchnorm._NormBase  # its buffers are statistics, which do not change results in training


class _Thread(threading.local):
    in_block = False


_thread = _Thread()


def in_recomputed_block() -> bool:
    """Whether a block runs whose forward is recomputed as a whole: in the forward, and in its recomputation."""
    return _thread.in_block


def _in_block(block: Callable[..., Value], *args: Any, **settings: Any) -> Value:
    before, _thread.in_block = _thread.in_block, True
    try:
        return block(*args, **settings)
    finally:
        _thread.in_block = before


def _on_copies(block: Callable[..., Value], value: Value, **given: Any) -> Value:
    if "popped" in given:  # values that skip stages, which a block may change too
        given["popped"] = copied(given["popped"])
    return block(copied(value), **given)


def recomputed(module: nn.Module, recompute: Recompute) -> Callable[..., Value]:
    """The function that F calls in place of a stage.

    Args:
        module: the stage. A stage made by `split` and an nn.Sequential have blocks; any other module is a single block.
        recompute: what its backward computes again.
    """
    if recompute is Recompute.NONE:
        return module
    runner = _Full(module) if recompute is Recompute.FULL else _Selective(module)
    if isinstance(module, StageModule):
        return partial(module, run=runner)
    if not is_plain_sequential(module):
        return lambda value, **popped: runner([module], module, value, **popped)

    def run_layers(value: Value) -> Value:
        layers = list(module.children())  # at this moment: one may have been replaced
        return run_blocks(layers, [True] * len(layers), value, runner)

    return run_layers


class _Full:
    """Runs blocks under checkpointing."""

    def __init__(self, stage: nn.Module) -> None:
        self._stage = stage
        # By the first module of a block, found in its first forward: contexts, and whether it works in place.
        self._blocks: dict[nn.Module, tuple[Callable[[], tuple[Any, Any]], bool]] = {}
        self._drawing: set[nn.Module] = set()  # first modules of blocks that draw from Python's or numpy's generator

    def __call__(self, modules: Sequence[nn.Module], block: Callable[..., Value], *args: Any, **settings: Any) -> Value:
        if not torch.is_grad_enabled():
            return block(*args, **settings)
        known = self._blocks.get(modules[0])
        before: list[tuple[str, Tensor, int]] = []  # versions of the buffers that a forward must not change
        if known is None:
            norms = [part for module in modules for part in module.modules() if isinstance(part, _Norm)]
            contexts = (lambda: (nullcontext(), _KeptStatistics(norms))) if norms else noop_context_fn
            known = contexts, any(map(may_change_input, modules))
            parts = [part for module in modules for part in module.modules() if not isinstance(part, _Norm)]
            before = [(name, b, b._version) for part in parts for name, b in part.named_buffers(recurse=False)]
        contexts, in_place = known
        # A block that works in place runs on a copy, because the recomputation needs its input.
        function = partial(_on_copies, block) if in_place else block
        exact = modules[0] in self._drawing or modules[0] not in self._blocks
        drawing = RepeatedDraws(partial(_in_block, function), exactly=exact)
        given = [(t, t._version) for t in tree_leaves(args) if isinstance(t, Tensor) and not t.is_inference()]
        result = checkpoint(drawing, *args, use_reentrant=False, context_fn=contexts, **settings)
        if any(tensor._version != version for tensor, version in given):
            raise RunError(
                f"module {_name_of(self._stage, modules[0])} changes its input in place: its recomputation would start "
                "from the changed values. Let it work on a copy (x = x.clone()), or use recompute 'none' for this "
                "stage."
            )
        for name, buffer, version in before:
            if buffer._version != version:
                raise RunError(
                    f"module {_name_of(self._stage, modules[0])} changes its buffer {name!r} in a forward: its "
                    "recomputation would start from the changed values. Use recompute 'none' for this stage."
                )
        if drawing.drew:
            if thread.shares_process:
                raise RunError(
                    f"module {_name_of(self._stage, modules[0])}, or another thread meanwhile, draws from Python's or "
                    "numpy's random generator, which ranks that are threads share: a recomputation would draw other "
                    "numbers. Use recompute 'none' for this stage, or processes."
                )
            self._drawing.add(modules[0])
        self._blocks[modules[0]] = known
        return result


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
                f"module {_name_of(self._stage, modules[0])} calls no attention that recompute 'selective' supports "
                "(F.scaled_dot_product_attention, nn.MultiheadAttention, causal_attention). Use 'full' or 'none' for "
                "this stage."
            )
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ATTENTION:
            return func(*args, **(kwargs or {}))
        self._found = True
        return checkpoint(partial(func, **(kwargs or {})), *args, use_reentrant=False)


class _KeptStatistics:
    """Restores running statistics after a recomputation: the forward has updated them already."""

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


def _name_of(stage: nn.Module, module: nn.Module) -> str:
    """Name and type of a module of a stage, for error messages."""
    name = next((name for name, part in stage.named_modules() if part is module), "")
    return f"{name or 'stage'!r} ({type(module).__name__})"
