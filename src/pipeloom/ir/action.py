"""`Action`: one `Op` of one stage on one micro-batch."""

from enum import StrEnum
from typing import NamedTuple


class Op(StrEnum):
    """The kind of an action. Printed actions show the value, as in ``2F0``."""

    F = "F"  # forward
    B = "B"  # full backward: gradients of the input and of the weights
    I = "I"  # noqa: E741  # backward of the input alone ("B" in the zero-bubble papers)
    W = "W"  # backward of the weights alone
    SEND_F = "SEND_F"  # send the output of a forward to the next stage
    RECV_F = "RECV_F"  # wait for the input of a forward
    SEND_B = "SEND_B"  # send the gradient of a stage's input to the previous stage
    RECV_B = "RECV_B"  # wait for the gradient of a stage's output
    SEND_SKIP = "SEND_SKIP"  # send values that skip stages to a stage that uses them
    RECV_SKIP = "RECV_SKIP"  # wait for them
    SEND_SKIP_GRAD = "SEND_SKIP_GRAD"  # send the gradients of such values back to the stage that they came from
    RECV_SKIP_GRAD = "RECV_SKIP_GRAD"  # wait for them
    REDUCE_GRAD = "REDUCE_GRAD"  # sum gradients over the ranks that hold the same parameters
    UNSHARD = "UNSHARD"  # gather the stage's sharded parameters
    RESHARD = "RESHARD"  # free them again
    OFFLOAD = "OFFLOAD"  # offload a stage's saved activations or states
    RELOAD = "RELOAD"  # reload them to the device
    STEP = "STEP"  # update the stage's parameters


COMPUTE_OPS = frozenset({Op.F, Op.B, Op.I, Op.W})
SKIP_SENDS, SKIP_RECEIVES = frozenset({Op.SEND_SKIP, Op.SEND_SKIP_GRAD}), frozenset({Op.RECV_SKIP, Op.RECV_SKIP_GRAD})
SKIP_OPS = SKIP_SENDS | SKIP_RECEIVES
SENDS, RECEIVES = {Op.SEND_F, Op.SEND_B} | SKIP_SENDS, {Op.RECV_F, Op.RECV_B} | SKIP_RECEIVES
COMMUNICATION_OPS = SENDS | RECEIVES
OTHER_ENDS = {  # from a message's op to the stage, relative to its own, and the op at the other end
    Op.SEND_F: (1, Op.RECV_F),
    Op.RECV_F: (-1, Op.SEND_F),
    Op.SEND_B: (-1, Op.RECV_B),
    Op.RECV_B: (1, Op.SEND_B),
}
_OTHER_SKIP_ENDS = {Op.SEND_SKIP: Op.RECV_SKIP, Op.SEND_SKIP_GRAD: Op.RECV_SKIP_GRAD}
_OTHER_SKIP_ENDS |= {receive: send for send, receive in _OTHER_SKIP_ENDS.items()}


class Action(NamedTuple):
    """One op of one stage on one micro-batch, or on one slice of it.

    `microbatch` is None for ops on the whole stage (REDUCE_GRAD, STEP, ...). `slice` is None unless sequences are
    sliced. ``str(Action(2, Op.F, 0))`` is ``"2F0"``, with slice 3 ``"2F0.3"``. Values that skip stages are not sliced:
    for their messages (`SKIP_OPS`), `slice` is the stage at the other end, so ``"0SEND_SKIP2.3"`` sends values of
    micro-batch 2 from stage 0 to stage 3.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    slice: int | None = None

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}"
        if self.microbatch is not None:
            text += str(self.microbatch)
        if self.slice is not None:
            text += f".{self.slice}"
        return text

    def with_op(self, op: Op) -> "Action":
        """The same stage, micro-batch and slice under another op."""
        return Action(self.stage, op, self.microbatch, self.slice)

    def other_end(self) -> "Action":
        """The RECV of this SEND, or the SEND of this RECV."""
        if self.op in SKIP_OPS:
            return Action(self.other_stage, _OTHER_SKIP_ENDS[self.op], self.microbatch, self.stage)
        return Action(self.other_stage, OTHER_ENDS[self.op][1], self.microbatch, self.slice)

    @property
    def other_stage(self) -> int:
        """The stage at the other end of a SEND or RECV."""
        if self.op in SKIP_OPS:
            assert self.slice is not None
            return self.slice
        return self.stage + OTHER_ENDS[self.op][0]
