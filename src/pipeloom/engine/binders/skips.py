"""Values that skip stages: what F, B and I do in addition (see `pipeloom.ir.skips`).

A stage module that uses such values names them in `pops`; its forward is then called ``forward(value, popped=popped)``.
One that makes some names them in `stashes`, and returns ``(output, stashed)``. Both are dicts by name.

F       takes the values that arrived, and hands out those that it stashes or passes on: further roots of its graph
B, I    start at these roots too, with the gradients that came back; further leaves are the values that it popped
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipeloom.autograd.split_backward import Root, root_of
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.ir import Action, Op, Program
from pipeloom.split.skips import without_stashed
from pipeloom.transport.interface import Message
from pipeloom.transport.values import Layout, Value, copied, flatten, tensors_in, unflatten


class SkipValues:
    """The values that one F takes and hands out.

    Args:
        module: the stage.
        run: the function that F calls in its place.
    """

    def __init__(
        self, state: RankState, action: Action, program: Program, module: Any, run: Callable[..., Value]
    ) -> None:
        self._state, self._key, self._run = state, (action.stage, action.microbatch, None), run
        self._stage, self._module = action.stage, module
        training, routes = not program.schedule.forward_only, state.wiring.skips
        stage, b = action.stage, action.microbatch
        self._arriving = [(stage, b, skip.source) for skip in program.skips_into.get(stage, ())]
        self._pops = bool(getattr(module, "pops", ()))
        self._stashes = bool(getattr(module, "stashes", ()))
        self._leaving = []
        for skip in program.skips_from.get(stage, ()):
            enter = bind_skip_entry(state, Action(skip.target, Op.F, b), stage, training and skip.has_gradient)
            here = program.placement.rank_of(skip.target, b or 0) == state.wiring.rank
            send = None if here else Action(stage, Op.SEND_SKIP, b, skip.target)
            self._leaving.append((routes[skip], skip.has_gradient, send, enter))
        self._popped: dict[str, Value] = {}
        self._arrived: dict[str, Value] = {}  # the same without copies: what this stage passes on
        self._stashed: dict[str, Value] = {}
        self._ran = False

    def take(self, leaves: list[Tensor]) -> list[Tensor]:
        """Take the values that arrived; returns `leaves` and theirs."""
        self._popped, self._arrived, self._ran = {}, {}, False
        counts = [len(leaves)]
        leaves = list(leaves)
        for place in self._arriving:
            popped, arrived, more = self._state.skip_values.pop(place)
            self._popped |= popped
            self._arrived |= arrived
            leaves += more
            counts.append(len(more))
        self._state.skip_counts[self._key] = counts
        return leaves

    def run(self, value: Value) -> Value:
        """Run the stage; returns its output."""
        given = {"popped": copied(self._popped) if self._ran else self._popped} if self._pops else {}
        self._ran = True  # a second call comes after one that changed its input in place
        output = self._run(value, **given)
        if not self._stashes:
            return output
        output, self._stashed = without_stashed(output, self._module.stashes)
        return output

    def leaving(self) -> list[Tensor]:
        """The tensors that `hand_out` will hand to other stages."""
        return tensors_in(self._arrived | self._stashed) if self._leaving else []

    def hand_out(self) -> list[Root]:
        """Hand values to the stages that use them; returns their roots."""
        roots: list[Root] = []
        values = self._arrived | self._stashed
        for names, has_gradient, send, enter in self._leaving:
            layout, tensors = flatten({name: values.get(name) for name in names}, "a stage stashed")
            detached = []
            for tensor in tensors:
                detached.append(tensor.detach())
                if has_gradient and tensor.requires_grad:
                    roots.append(root_of(tensor))
            if send is None:
                enter(layout, detached)
            else:
                self._state.departing[send] = (layout, detached)
        self._popped, self._arrived, self._stashed = {}, {}, {}
        return roots


def bind_skip_values(
    state: RankState, action: Action, program: Program, module: Any, run: Callable[..., Value]
) -> SkipValues | None:
    """What the F of `action` takes and hands out; None where no value skips this stage's neighbours."""
    stage = action.stage
    if stage not in program.skips_into and stage not in program.skips_from:
        return None
    return SkipValues(state, action, program, module, run)


def bind_skip_entry(
    state: RankState, forward: Action, source: int, has_gradient: bool
) -> Callable[[Layout, list[Tensor]], None]:
    """The function that keeps values from stage `source` for `forward`: trained ones become leaves of its graph."""
    place, copies_input = (forward.stage, forward.microbatch, source), state.wiring.copies_input

    def enter(layout: Layout, tensors: list[Tensor]) -> None:
        leaves: list[Tensor] = []
        if has_gradient:
            leaves = [t.requires_grad_() for t, (_, _, wants) in zip(tensors, layout.specs, strict=True) if wants]
        arrived = unflatten(layout, tensors)
        state.skip_values[place] = (copied(arrived) if copies_input[forward.stage] else arrived, arrived, leaves)

    return enter


def bind_skip_gradients(
    state: RankState, action: Action, program: Program
) -> tuple[Callable[[], list[Tensor | None]] | None, Callable[[Sequence[Tensor | None]], list[Tensor | None]] | None]:
    """Two functions for a B or I, each None where it is not needed.

    The first returns the gradients of the values that the stage handed out, the second takes the gradients of all
    leaves, passes on those of popped values, and returns the others.
    """
    stage, _, b, _ = action
    leaving = [(stage, b, skip.target) for skip in program.skips_from.get(stage, ()) if skip.has_gradient]
    arriving = program.skips_into.get(stage, ())
    key, rank = (stage, b, None), state.wiring.rank

    def come_back() -> list[Tensor | None]:
        return [gradient for place in leaving for gradient in state.skip_gradients.pop(place)]

    def send_back(found: Sequence[Tensor | None]) -> list[Tensor | None]:
        own, *counts = state.skip_counts.pop(key)
        at = own
        for skip, count in zip(arriving, counts, strict=True):
            part = list(found[at : at + count])
            at += count
            if not skip.has_gradient:
                continue
            if program.placement.rank_of(skip.source, b or 0) == rank:
                state.skip_gradients[skip.source, b, stage] = part
            else:
                send = Action(stage, Op.SEND_SKIP_GRAD, b, skip.source)
                state.departing[send] = flatten(part, "a backward made")
        return list(found[:own])

    return come_back if leaving else None, send_back if stage in program.skips_into else None


def bind_skip_receive(state: RankState, action: Action, program: Program, receive: Callable[[], Message]) -> Step:
    """RECV_SKIP and RECV_SKIP_GRAD; `receive` returns the message."""
    stage, op, b, other = action
    assert other is not None
    if op is Op.RECV_SKIP_GRAD:
        place = (stage, b, other)

        def take_gradients() -> None:
            message = receive()
            state.skip_gradients[place] = unflatten(message.layout, message.tensors)

        return take_gradients, None
    trained = any(skip.has_gradient for skip in program.skips_into[stage] if skip.source == other)
    enter = bind_skip_entry(state, action.with_op(Op.F), other, trained and not program.schedule.forward_only)

    def take_values() -> None:
        message = receive()
        enter(message.layout, message.tensors)

    return take_values, None
