"""Numbers of a pipeline's calls.

The number of the call travels with every message, so that ranks notice when they make different calls. It also
has the number of samples of the batch. A rank that reads neither inputs nor targets learns it from the first message
that has it, and passes it on. So it is with a number of the batch's form.
"""

from enum import IntEnum

from pipeloom.errors import RunError


class Call(IntEnum):
    """What all ranks do in a call."""

    FORWARD = 0
    STEP = 1
    GENERATE = 2


_NAMES = {Call.FORWARD: "evaluate or forward", Call.STEP: "step", Call.GENERATE: "generate"}

# number = form, samples, then _NUMBERS * count + _CANCEL + _REFUSE + a `Call`
_KINDS, _CANCEL, _REFUSE, _NUMBERS = 4, 4, 8, 16
_COUNT_BITS = 36  # of 64; the other 28 are for the number of samples
_MAX_SAMPLES = 1 << 28
_FORM_BIT = 64  # 16 bits


def call_number(count: int, kind: Call, num_samples: int = 0, form: int = 0) -> int:
    """The number of every message of a pipeline's `count`-th call.

    Args:
        count: of the call.
        kind: what the ranks do in it.
        num_samples: of the batch; 0 where it is not known yet.
        form: a number of its form, of 16 bits; 0 where it is not known yet.
    """
    return form << _FORM_BIT | min(num_samples, _MAX_SAMPLES - 1) << _COUNT_BITS | _NUMBERS * count + kind


def in_words(call: int) -> tuple[int, int]:
    """The number in 64 and 16 bits, as messages have it."""
    return call & ((1 << _FORM_BIT) - 1), call >> _FORM_BIT


def of_words(low: int, high: int) -> int:
    """The inverse of `in_words`."""
    return high << _FORM_BIT | low


def call_only(call: int) -> int:
    """The number without samples and form."""
    return call & ((1 << _COUNT_BITS) - 1)


def num_samples_of(call: int) -> int:
    """How many samples the batch has; 0 where that is not known."""
    return call >> _COUNT_BITS & (_MAX_SAMPLES - 1)


def form_number_of(call: int) -> int:
    """The number of the batch's form; 0 where that is not known."""
    return call >> _FORM_BIT


def call_count(call: int) -> int:
    """The inverse of `call_number`."""
    return call_only(call) // _NUMBERS


def cancel_number(call: int) -> int:
    """The number of a message that cancels `call`: no message of it will follow."""
    return call + _CANCEL


def refusal_number(call: int) -> int:
    """The number of a message that refuses `call`: the batch of a rank is invalid, so no rank runs the call."""
    return call_only(call) | _REFUSE


def is_refusal(call: int) -> bool:
    """Whether a message has a number of `refusal_number`."""
    return bool(call & _REFUSE)


def out_of_step(source: int, theirs: int, ours: int) -> RunError:
    """The error on a rank in call `ours` that got a message of call `theirs` from rank `source`."""
    return RunError(
        f"rank {source} is in {call_name(theirs)}, this rank in {call_name(ours)}: all ranks must make the same "
        "calls of the Pipeline in the same order. Look for a call that some ranks skip."
    )


def call_name(call: int) -> str:
    """The call in words, for error messages."""
    return f"call {call_count(call)} ({_NAMES[Call(call % _KINDS)]})"
