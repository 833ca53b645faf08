"""Runs a model on slices of a sequence: state that attention, positions and dropout share between slices.

The engine runs each slice inside a `SliceContext`, modules read it with `current_slice`, and `make_sliceable` checks
that the modules of a model give the same result on slices as on the full sequence.
"""

from pipeloom.slicing.attention import TokenDropout, causal_attention, dropout
from pipeloom.slicing.context import Slice, SliceContext, current_slice
from pipeloom.slicing.sliceable import RefuseRawAttention, make_sliceable

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
