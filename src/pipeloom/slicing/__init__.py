"""Slices of a sequence inside a model: what attention, positions and dropout need to know of the other slices.

`SliceContext` is the caller's side, `current_slice` a module's, and `make_sliceable` stands between: it refuses models
whose modules would compute something else on slices than on the whole sequence.
"""

from pipeloom.slicing.attention import causal_attention
from pipeloom.slicing.check import RefuseRawAttention, make_sliceable
from pipeloom.slicing.context import Slice, SliceContext, current_slice
from pipeloom.slicing.dropout import TokenDropout, dropout

__all__ = [
    "RefuseRawAttention",
    "Slice",
    "SliceContext",
    "TokenDropout",
    "causal_attention",
    "current_slice",
    "dropout",
    "make_sliceable",
]
