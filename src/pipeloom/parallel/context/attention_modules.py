"""What attention modules of a model say of themselves before they run: heads, and dropout of attention weights.

A module may have these attributes; transformers' modules have theirs.

    attention_heads      (query heads, key heads) of this process
    attention_dropout    dropout probability of attention weights
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from pipeloom.parallel.context.all_to_all import check_heads
from pipeloom.parallel.context.context_tokens import ContextKind
from pipeloom.slicing.attention import refused_dropout


def check_heads_of_model(modules: Iterable[nn.Module], kind: ContextKind, degree: int) -> None:
    """Validate that the heads of a model can be divided between context-parallel ranks.

    Args:
        modules: its stages.
        kind: how attention communicates; "ulysses" divides heads.
        degree: number of ranks.

    Raises:
        InputError: they cannot. Modules that do not say how many they have are checked when they run.
    """
    if kind != "ulysses":
        return
    for heads in {attention_heads(part) for module in modules for part in module.modules()}:
        if heads is not None:
            check_heads(*heads, degree)


def attention_heads(module: Any) -> tuple[int, int] | None:
    """Query heads and key heads of a module on this process; None: it does not say."""
    found = getattr(module, "attention_heads", None)
    if isinstance(found, tuple):
        return found
    if not _of_transformers(module):
        return None
    width = getattr(module, "head_dim", None)
    if isinstance(width, int) and hasattr(module, "q_proj") and hasattr(module, "k_proj"):
        return _outputs(module.q_proj) // width, _outputs(module.k_proj) // width
    if hasattr(module, "c_attn") and isinstance(getattr(module, "num_heads", None), int):
        return module.num_heads, module.num_heads
    return None


def _outputs(layer: Any) -> int:
    return layer.out_features if isinstance(layer, nn.Linear) else layer.weight.shape[0]  # blocks, of cut layers


def attention_dropout(module: Any) -> float:
    """The dropout probability of a module's attention weights in training; 0 where it says nothing."""
    names = ("attention_dropout", "attn_dropout") if _of_transformers(module) else ("attention_dropout",)
    found = [getattr(module, name, 0.0) for name in names]
    rates = [each.p if isinstance(each, nn.Dropout) and _of_transformers(module) else each for each in found]
    return max((rate for rate in rates if isinstance(rate, float)), default=0.0)


def with_dropout(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with dropout of attention weights."""
    return [part for module in modules for part in module.modules() if attention_dropout(part) > 0]


def check_dropout(modules: Sequence[nn.Module]) -> None:
    """Raises InputError where one of `modules`, as of `with_dropout`, is in training mode."""
    rate = next((attention_dropout(module) for module in modules if module.training), 0.0)
    if rate > 0:
        raise refused_dropout(rate)


def _of_transformers(module: object) -> bool:
    return type(module).__module__.startswith("transformers.")
