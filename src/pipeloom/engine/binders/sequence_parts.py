"""Context parallelism: what F, B and I do in addition.

stage 0        a micro-batch is (this rank's tokens, marks): marks are the length and masks of whole sequences
other stages   receive (value, marks)
F, B, I        run inside the tokens of the micro-batch, in which attention finds the other ranks
"""

from collections.abc import Callable
from contextlib import nullcontext

from pipeloom.engine.batch import Batch
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Program
from pipeloom.slicing import RefuseRawAttention, SequenceParts
from pipeloom.transport.values import Value


def cut_tokens(batch: Batch, parts: SequenceParts) -> None:
    """Keep this rank's tokens of a batch. Raises InputError where the sequences cannot be cut."""
    batch.inputs = [parts.cut_inputs(value) for value in batch.inputs]
    if batch.targets is not None:
        batch.targets = [parts.cut_targets(value) for value in batch.targets]


def module_of_tokens(
    state: RankState, action: Action, program: Program, forward: Callable[[Value], Value]
) -> Callable[[Value], Value]:
    """The function that F calls: (value, marks) -> (value, marks).

    `forward` is the function that F of whole sequences calls.
    """
    stage, _, microbatch, _ = action
    parts, module = state.wiring.parts, state.wiring.stages[stage]
    assert parts is not None
    key, keeps = (stage, microbatch or 0), not program.schedule.forward_only
    to_check = microbatch == 0  # only in the first step: the check takes time

    def run(value: Value) -> Value:
        nonlocal to_check
        value, marks = value
        watch = RefuseRawAttention(module) if to_check else nullcontext()
        to_check = False
        tokens = parts.tokens(marks)
        with tokens.current(), watch:
            output = forward(value)
        if keeps:
            state.tokens[key] = tokens
        return output, marks

    return run


def in_tokens(state: RankState, action: Action, step: Step) -> Step:
    """A backward inside the tokens of its micro-batch, which recomputed blocks read."""
    run, ready = step
    key = (action.stage, action.microbatch or 0)

    def backward() -> None:
        with state.tokens.pop(key).current():
            run()

    return backward, ready
