"""CUDA graphs of a process's actions: each F, B, I and W is recorded once, and replayed in every later step.

    step 1, 2   run as without graphs: kernels are chosen, workspaces and seeds of backwards made
    step 3      every F, B, I and W is recorded in the order of the program, and replayed at once
    step 4 ...  F, B, I and W are replayed; SEND, RECV and REDUCE_GRAD run as always

A recording reads and writes fixed memory. What comes from outside is copied there first; what goes outside is copied
from there:

    inputs, targets     a buffer per micro-batch, filled when the step begins
    RECV                a buffer per message, filled when it arrives; within one process nothing is copied, since the
                        memory of the sender's result is known already
    SEND                a copy, in the stream that computes: a later recording may use the memory of the result again
    losses              copies
    gradients           stay where the recorded backwards wrote them, and become the parameters' ``.grad`` again

All recordings of a process share one pool, so that activations take no more memory than in a step without graphs.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.devices.graphs import Graphs
from pipeloom.engine.batch import Batch, Declared
from pipeloom.engine.rank_state import RankState, Step
from pipeloom.errors import InputError, PipeloomError, RunError, one_line
from pipeloom.ir import Action, Op, Program
from pipeloom.ir.action import SENDS
from pipeloom.transport.values import Layout, Value, copied, flatten

_NUM_EAGER_STEPS = 2
_Run = Callable[[], None]
_RECORDED = frozenset({Op.F, Op.B, Op.I, Op.W})


class _Mode(Enum):
    EAGER = "eager"
    RECORD = "record"
    REPLAY = "replay"


@dataclass(slots=True)
class _Recording:
    """One action.

    Attributes:
        replay: does on the device what the action does.
        gradients: parameters whose gradient the action made, and the memory that it writes.
        loss: of the last stage's F, times its share of the batch.
        declared: what an F declared.
    """

    replay: Callable[[], None]
    gradients: list[tuple[nn.Parameter, Tensor]]
    loss: Tensor | None = None
    declared: Declared | None = None


@dataclass(slots=True)
class _Recorded:
    """All that was recorded.

    Attributes:
        terms: what must be as it was when the actions were recorded.
        layouts: of the batch, which no later step may change.
        inputs, targets: buffers of the micro-batches.
        actions: the computations.
        sent: by SEND, what it passes on: the layout, and its tensors; within one process tensors without memory.
        arriving: by RECV, the buffers of its message.
        peak_live: the peak of live activations in a step, by rank.
    """

    terms: Any = None
    layouts: Any = None
    inputs: Sequence[Value] = ()
    targets: Sequence[Value] | None = None
    actions: dict[Action, _Recording] = field(default_factory=dict)
    sent: dict[Action, tuple[Layout, list[Tensor]]] = field(default_factory=dict)
    arriving: dict[Action, list[Tensor]] = field(default_factory=dict)
    peak_live: dict[int, int] = field(default_factory=dict)


class ActionGraphs:
    """Records and replays the actions of the ranks of this process.

    Args:
        graphs: of the device where they compute.
        shares_memory: whether messages are references, since all ranks are in this process.
    """

    def __init__(self, graphs: Graphs, *, shares_memory: bool) -> None:
        self._graphs, self._shares_memory = graphs, shares_memory
        self._states: dict[int, RankState] = {}
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._mode = _Mode.EAGER
        self._steps, self._recorded = 0, _Recorded()
        self._before: list[tuple[nn.Parameter, Tensor]] = []  # gradients of earlier steps, set aside

    def add(self, state: RankState) -> None:
        """A rank of this process; called once for each, before any step.

        Raises:
            InputError: one of its stages works in place.
        """
        for stage, copies in state.wiring.copies_input.items():
            if copies and stage > 0:
                raise InputError(_in_place(stage))
        self._states[state.wiring.rank] = state
        for module in state.wiring.stages.values():
            self._modules.extend(module.modules())
            self._parameters.extend(module.parameters())
        self._parameters = list(dict.fromkeys(self._parameters))

    # Steps

    def check(self, batch: Batch) -> None:
        """Raises InputError where the batch of a step has other shapes than the one that was recorded."""
        found, recorded = _batch_layouts(batch), self._recorded
        if recorded.actions and recorded.layouts != found:
            raise InputError(
                f"graphs=True: a step has micro-batches of {_words(found)}, and earlier ones had "
                f"{_words(recorded.layouts)}: recorded actions need the same shapes and constants in every step. Pad "
                "the batch, leave a smaller last batch out, or use graphs=False."
            )

    def begin(self, batch: Batch, program: Program, loss_scale: float) -> None:
        """A step of `program` begins on `batch`, whose inputs and targets become those that recordings read."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        terms = (id(program), tuple(batch.weights), loss_scale, [m.training for m in self._modules], trained)
        recorded = self._recorded
        if recorded.terms != terms:  # the first step; or layers were frozen or set to evaluation, or weights changed
            self._steps = 0 if recorded.terms is None else _NUM_EAGER_STEPS - 1
            recorded = self._recorded = _Recorded(terms, _batch_layouts(batch))
        self._steps += 1
        if recorded.actions:
            self._mode = _Mode.REPLAY
        elif self._steps <= _NUM_EAGER_STEPS:
            self._mode = _Mode.EAGER
            return
        else:
            self._mode = _Mode.RECORD
            gc.collect()  # what is freed later, in the middle of a recording, could be of another graph
            recorded.inputs = [copied(value) for value in batch.inputs]
            recorded.targets = None if batch.targets is None else [copied(value) for value in batch.targets]
        self._set_gradients_aside()
        if self._mode is _Mode.REPLAY:
            for buffers, values in ((recorded.inputs, batch.inputs), (recorded.targets, batch.targets)):
                for buffer, value in zip(buffers or (), values or (), strict=True):
                    _fill(buffer, value)
        batch.inputs, batch.targets = recorded.inputs, recorded.targets

    def end(self) -> None:
        """The step is over: gradients of earlier steps are added."""
        for rank, state in self._states.items():
            if self._mode is _Mode.RECORD:
                self._recorded.peak_live[rank] = state.peak_live
            elif self._mode is _Mode.REPLAY:
                state.peak_live = self._recorded.peak_live[rank]
        for parameter, before in self._before:
            parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []

    def failed(self) -> None:
        """The step failed: nothing that was recorded is used again."""
        self._mode, self._steps, self._recorded = _Mode.EAGER, 0, _Recorded()
        for parameter, before in self._before:
            parameter.grad = before
        self._before = []

    def _set_gradients_aside(self) -> None:
        """Recorded backwards write the first gradients of a step, and add to them: those of earlier steps wait."""
        held = {id(gradient) for recording in self._recorded.actions.values() for _, gradient in recording.gradients}
        for parameter in self._parameters:
            if parameter.grad is not None:
                before = parameter.grad
                self._before.append((parameter, before.clone() if id(before) in held else before))
                parameter.grad = None

    # Actions

    def around(self, state: RankState, action: Action, step: Step) -> Step:
        """The step of an action of one rank, recorded and replayed."""
        run, ready = step
        if action.op in _RECORDED:
            record, replay = self._bind_computation(state, action, run)
        elif action.op in SENDS:
            record, replay = self._bind_send(state, action, run)
        elif action.op in (Op.RECV_F, Op.RECV_B):
            record, replay = run, self._bind_receive(state, action, run)
        else:
            return step
        choices = {_Mode.EAGER: run, _Mode.RECORD: record, _Mode.REPLAY: replay}

        def chosen() -> None:
            choices[self._mode]()

        return chosen, ready

    def arrive(self, action: Action, tensors: list[Tensor]) -> list[Tensor]:
        """What a RECV hands on in place of the tensors of its message.

        Raises:
            RunError: they have other shapes than in the recorded step.
        """
        if self._mode is _Mode.EAGER or self._shares_memory:
            return tensors
        if self._mode is _Mode.RECORD:
            self._recorded.arriving[action] = [tensor.clone() for tensor in tensors]
        buffers = self._recorded.arriving[action]
        if self._mode is _Mode.REPLAY:
            if _layouts(buffers) != _layouts(tensors):
                raise RunError(
                    f"a message has tensors of {_words([_layouts(tensors)])}, and earlier ones had "
                    f"{_words([_layouts(buffers)])}: recorded actions need the same shapes in every step. Use "
                    "graphs=False."
                )
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
        return [buffer.detach() for buffer in buffers]

    def _bind_computation(self, state: RankState, action: Action, run: Callable[[], None]) -> tuple[_Run, _Run]:
        assert action.microbatch is not None
        key, b = (action.stage, action.microbatch, action.slice), action.microbatch
        parameters = list(state.wiring.stages[action.stage].parameters())
        is_forward, has_loss = action.op is Op.F, action.op is Op.F and action.stage == len(state.wiring.recompute) - 1

        def record() -> None:
            before = [parameter.grad for parameter in parameters]
            if is_forward and action.stage and state.wiring.copies_input[action.stage]:
                raise RunError(_in_place(action.stage))
            try:
                replay = self._graphs.record(run)
            except PipeloomError:
                raise
            except RuntimeError as error:
                raise RunError(
                    f"it cannot be recorded in a CUDA graph ({one_line(error)}). Let stage and loss read no value on "
                    "the host (no item(), no branch on a tensor, no tensor made from Python numbers), or use "
                    "graphs=False."
                ) from error
            replay()
            made = [
                (parameter, parameter.grad)
                for parameter, gradient in zip(parameters, before, strict=True)
                if parameter.grad is not None and parameter.grad is not gradient
            ]
            recording = self._recorded.actions[action] = _Recording(replay, made)
            if is_forward:
                recording.declared = state.batch.declared.get(key)
            if has_loss:
                recording.loss = state.batch.losses[b]
                state.batch.losses[b] = recording.loss.clone()

        def replay() -> None:
            recording = self._recorded.actions[action]
            recording.replay()
            for parameter, gradient in recording.gradients:
                parameter.grad = gradient
            if recording.declared is not None:
                state.batch.declared[key] = recording.declared
            if recording.loss is not None:
                state.batch.losses[b] = recording.loss.clone()

        return record, replay

    def _bind_send(self, state: RankState, action: Action, run: Callable[[], None]) -> tuple[_Run, _Run]:
        departing = state.departing

        def record() -> None:
            layout, tensors = departing[action]
            if self._shares_memory:
                kept = [torch.empty_like(tensor, device="meta") for tensor in tensors]
            else:
                kept = [self._graphs.alias(tensor) for tensor in tensors]
                departing[action] = (layout, [tensor.clone() for tensor in tensors])
            self._recorded.sent[action] = (layout, kept)
            run()

        def replay() -> None:
            layout, kept = self._recorded.sent[action]
            departing[action] = (layout, list(kept) if self._shares_memory else [tensor.clone() for tensor in kept])
            run()

        return record, replay

    def _bind_receive(self, state: RankState, action: Action, run: Callable[[], None]) -> _Run:
        key = (action.stage, action.microbatch, action.slice)

        def replay() -> None:
            run()
            state.arrived.pop(key, None)  # the recorded action reads the memory of the message
            state.gradients.pop(key, None)

        return replay


def _in_place(stage: int) -> str:
    return (
        f"graphs=True: stage {stage} changes its input in place, so it gets a copy, which is not recorded. Let its "
        "first layers work out of place (inplace=False), or use graphs=False."
    )


def _layouts(values: Sequence[Value] | None) -> list[Layout]:
    return [flatten(value)[0] for value in values or ()]


def _batch_layouts(batch: Batch) -> list[list[Layout]]:
    return [_layouts(values) for values in (batch.inputs, batch.targets)]


def _words(layouts: Sequence[Sequence[Layout]]) -> str:
    """The shapes and dtypes, each once."""
    specs = [spec for group in layouts for layout in group for spec in layout.specs]
    found = {f"{list(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in specs}
    return ", ".join(sorted(found)) or "no tensors"


def _fill(buffer: Value, value: Value) -> None:
    for kept, tensor in zip(flatten(buffer)[1], flatten(value)[1], strict=True):
        kept.copy_(tensor)
