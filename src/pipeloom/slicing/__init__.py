"""Runs a model on parts of a sequence: state that attention, positions and dropout share between the parts.

The engine runs each slice inside a `SliceContext`, and the tokens of a context-parallel rank inside `Tokens`. Modules
ask `attention` and `position_rows`, which know both, and `make_sliceable` checks that the modules of a model give the
same result on parts as on the full sequence.
"""

from pipeloom.slicing.attention import TokenDropout, attention, causal_attention, dropout
from pipeloom.slicing.context import Slice, SliceContext, current_slice
from pipeloom.slicing.positions import position_rows, sequence_length, token_positions
from pipeloom.slicing.sequence_parts import SequenceParts
from pipeloom.slicing.sliceable import RefuseRawAttention, make_sliceable
from pipeloom.slicing.tokens import Tokens, current_tokens

__all__ = [
    "RefuseRawAttention",
    "SequenceParts",
    "Slice",
    "SliceContext",
    "TokenDropout",
    "Tokens",
    "attention",
    "causal_attention",
    "current_slice",
    "current_tokens",
    "dropout",
    "make_sliceable",
    "position_rows",
    "sequence_length",
    "token_positions",
]
