"""Context parallelism: several ranks share the tokens of each sequence, and exchange keys and values in attention.

order                  which tokens each rank holds: zig-zag or plain
masks                  which keys a query attends to: causal order, windows, padding, documents
kernels                attention of one block with its log-sum-exp
ring                   ring attention (arXiv:2310.01889)
ring_self_attention    two passes and a whole softmax (arXiv:2105.13120)
attention_modules      heads and dropout of a model's attention, before it runs
all_to_all             all-to-all over heads (DeepSpeed-Ulysses, arXiv:2309.14509)
context_tokens         the tokens of a micro-batch on this rank, and their attention
context_parallel       cuts batches along the sequence
traffic                bytes that ranks send, in closed form

Names that need torch are imported on first use.
"""

from typing import TYPE_CHECKING

from pipeloom.common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeloom.parallel.context.context_parallel import KINDS, ContextParallel
    from pipeloom.parallel.context.context_tokens import ContextKind, ContextTokens

# Module -> its public names, loaded at first use.
_LAZY = {
    "pipeloom.parallel.context.context_parallel": "KINDS ContextParallel",
    "pipeloom.parallel.context.context_tokens": "ContextKind ContextTokens",
}

__all__ = ["KINDS", "ContextKind", "ContextParallel", "ContextTokens"]

__getattr__ = lazy_exports(__name__, _LAZY)
