"""Numbers of a pipeline's calls. One goes with every message, by which ranks notice that they are out of step.

A training call whose parameters turned out to be wrong is cancelled and done again as the next call. A rank that
cancels says so to its peers, by a message without a value whose number says which call is meant.
"""

from __future__ import annotations

_TRAINING, _CANCEL, _KINDS = 1, 2, 4  # number = _KINDS * count + _TRAINING + _CANCEL


def call_number(count: int, training: bool) -> int:
    """What goes with every message of a pipeline's `count`-th call."""
    return _KINDS * count + (_TRAINING if training else 0)


def call_count(call: int) -> int:
    """The inverse of `call_number`."""
    return call // _KINDS


def next_call(call: int) -> int:
    """The number of the call after `call`, of the same kind."""
    return call + _KINDS


def cancel_number(call: int) -> int:
    """What goes with the message that cancels `call`."""
    return call + _CANCEL


def call_name(call: int) -> str:
    """For people."""
    return f"call {call_count(call)} of this Pipeline, {'step' if call & _TRAINING else 'evaluate or forward'}"
