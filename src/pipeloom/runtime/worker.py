"""`Worker`: one rank's stages and the loop that runs its program.

A program is bound once: every action becomes a function without arguments that has its module, its channel and its
place in the worker's stores at hand. A step then is one loop over those functions; nothing is looked up in it.

What lives where during a step, and until when:

    arrived[stage, b]    input of a forward, from RECV_F or the chunk before on this rank      until F
    saved[stage, b]      input leaves and roots of the autograd graph: one live activation      F to B or I
                         after a split backward's I, what its W needs: still the same one       I to W
    gradients[stage, b]  gradient of a stage's output, from RECV_B or the chunk after            until B or I
    departing[action]    a result on its way to another rank                                    until its SEND

Of a stage's output only the graph is kept, not the numbers: after it is sent nobody here reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeloom.errors import InputError, PeerLost, PipeloomError, RunError, StageError
from pipeloom.ir import Action, Op, Program, peer_of
from pipeloom.passes import warm_up_lengths
from pipeloom.runtime.calls import call_name, cancel_number, next_call
from pipeloom.runtime.gradient_sum import GradientSum
from pipeloom.runtime.speculation import CancelledError, ForwardState, Speculation
from pipeloom.runtime.split_backward import Root, WeightGradients, backward_input, run_backward
from pipeloom.runtime.transport import Channel, Lane, Message, Transport
from pipeloom.runtime.values import Layout, Value, copied, flatten, unflatten

LossFn = Callable[[Any, Any], Tensor]
_Key = tuple[int, int | None, int | None]  # stage, micro-batch, slice

BLACKBOX_BYTES = 64  # how much of a blackbox the label of the running action takes


@dataclass
class Batch:
    """What the actions of one step read and write beside messages.

    Attributes:
        inputs: of every micro-batch, on ranks with the first stage.
        targets: of every micro-batch, on ranks with the last stage; None where no loss is asked for.
        weights: the share of each micro-batch in the loss.
        losses: of the micro-batches whose last stage ran here, each times its weight.
        outputs: of the last stage, where no loss is asked for.
    """

    inputs: Sequence[Value] = ()
    targets: Sequence[Value] | None = None
    weights: Sequence[float] = ()
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Instruction:
    """One action, bound."""

    action: Action
    run: Callable[[], None]
    ready: Callable[[], bool] | None  # asked before `run` where one thread drives several ranks
    label: bytes


@dataclass
class Bound:
    """A program bound to one worker, and when its actions last started and ended (time.perf_counter, seconds).

    Attributes:
        instructions: what it runs.
        num_warm_up: so many of the first can be thrown away and done again: forwards that need no backward.
        training: whether there are backwards.
        starts, ends: of the last run.
    """

    instructions: tuple[_Instruction, ...]
    num_warm_up: int
    training: bool
    starts: list[float]
    ends: list[float]

    def records(self) -> list[tuple[Action, float, float]]:
        """The last run: every action with its start and end."""
        return [(i.action, s, e) for i, s, e in zip(self.instructions, self.starts, self.ends, strict=True)]


class Worker:
    """Runs the programs of one rank.

    Args:
        rank: which.
        stages: the modules of the stages that this rank holds.
        loss_fn: ``loss_fn(output, target)`` of one micro-batch, a scalar; used on the last stage.
        transport: with all channels of the programs open.
        gradient_sum: the parameters that other ranks hold too.
        blackbox: a buffer of at least `BLACKBOX_BYTES` bytes into which the running action is written, for whoever
            has to say after a crash what this rank was doing.
    """

    def __init__(
        self,
        rank: int,
        stages: dict[int, nn.Module],
        *,
        loss_fn: LossFn | None,
        transport: Transport,
        gradient_sum: GradientSum,
        blackbox: Any = None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.batch = Batch()
        self.peak_live_activations = 0
        self.call = 0
        self._speculating = False
        self._stale_calls: tuple[int, ...] = ()  # what still arrives of them is dropped
        self._loss_fn = loss_fn
        self._transport = transport
        self._gradient_sum = gradient_sum
        self._blackbox = blackbox
        self._arrived: dict[_Key, tuple[Value, list[Tensor]]] = {}
        self._saved: dict[_Key, tuple[list[Tensor], list[Root]] | WeightGradients | None] = {}
        self._gradients: dict[_Key, Sequence[Tensor | None]] = {}
        self._departing: dict[Action, tuple[Layout, list[Tensor]]] = {}
        self._sends: dict[Channel, Callable[[Layout, list[Tensor], int], None]] = {}  # to all this rank sends to
        self._seeds: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}
        # A leaf may not be changed in place, so a stage that might do that to its input gets a copy of it.
        self._copies_input = {
            stage: any(getattr(m, "inplace", False) is True for m in module.modules())
            for stage, module in stages.items()
        }

    @property
    def live_activations(self) -> int:
        """How many activations are held at this moment."""
        return len(self._saved)

    def bind(self, program: Program) -> Bound:
        """Turn this rank's part of `program` into functions."""
        instructions: list[_Instruction] = []
        for action in program.orders[self.rank]:
            steps: list[tuple[Callable[[], None], Callable[[], bool] | None]]
            if action.op is Op.REDUCE_GRAD:
                steps = self._gradient_sum.bind(action.stage)
            else:
                binder = _BINDERS.get(action.op)
                if binder is None:
                    raise InputError(
                        f"action {action} on rank {self.rank}: the executor runs "
                        f"{', '.join(op.value for op in _BINDERS)} and REDUCE_GRAD; take a schedule without {action.op}"
                    )
                steps = [binder(self, action, program)]
            label = f"{action}".encode().ljust(BLACKBOX_BYTES, b"\0")[:BLACKBOX_BYTES]
            for run, ready in steps:
                instructions.append(_Instruction(action, run, None if self._transport.blocking else ready, label))
        times = len(instructions)
        return Bound(
            tuple(instructions),
            warm_up_lengths(program)[self.rank],
            not program.schedule.forward_only,
            [0.0] * times,
            [0.0] * times,
        )

    def run(self, bound: Bound, batch: Batch, call: int, speculation: Speculation | None = None) -> Iterator[None]:
        """Run a bound program; yields whenever it has to wait and the transport does not block.

        Args:
            bound: the program.
            batch: what it reads and writes.
            call: a number that is the same on all ranks if they make the same calls; it goes with every message.
            speculation: says, during the warm-up, whether the parameters were the right ones. If not, the run begins
                anew with the next call's number.

        Raises:
            StageError: the module, the loss or autograd raised.
            PeerLost: a rank it waited for went away.
        """
        self.batch = batch
        self.peak_live_activations = 0
        self.call = call
        try:
            start = 0
            if speculation is not None:
                start = self._warm_up(bound, speculation)
            if bound.training:
                self._gradient_sum.begin()
            yield from self._execute(bound, start, len(bound.instructions))
        finally:
            self._forget()
            self.batch = Batch()

    def _execute(self, bound: Bound, start: int, stop: int) -> Iterator[None]:
        """Run the instructions from `start` to before `stop`."""
        starts, ends, blackbox = bound.starts, bound.ends, self._blackbox
        position = start
        try:
            for position, instruction in enumerate(bound.instructions[start:stop], start):
                if instruction.ready is not None:
                    while not instruction.ready():
                        yield
                if blackbox is not None:
                    blackbox[:BLACKBOX_BYTES] = instruction.label
                starts[position] = perf_counter()
                instruction.run()
                ends[position] = perf_counter()
        except CancelledError:
            raise
        except Exception as error:
            raise self._explain(error, bound.instructions[position].action) from error

    def _warm_up(self, bound: Bound, speculation: Speculation) -> int:
        """Run forwards until it is known whether their parameters stand; returns how many instructions then count."""
        before = ForwardState.take(self.stages.values(), with_random_state=speculation.owns_random_state)
        failure: RunError | None = None
        position = 0
        self._speculating = True
        try:
            while position < bound.num_warm_up and not speculation.ready(self.rank):
                for _ in self._execute(bound, position, position + 1):
                    pass
                position += 1
        except CancelledError as error:
            failure = PeerLost(str(error))
        except StageError as error:  # it may be the wrong parameters that make a stage raise
            failure = error
        self._speculating = False
        if failure is not None:  # before any wait: somebody may wait for what this rank will not send
            self._cancel()
        if speculation.validate(self.rank):
            if failure is not None:
                raise failure
            return position
        if failure is None:
            self._cancel()
        self._forget()
        self.peak_live_activations = 0
        before.restore()
        self._stale_calls = (self.call, cancel_number(self.call))
        self.call = next_call(self.call)
        return 0

    def _cancel(self) -> None:
        """Tell all who may wait for a forward of this call that none will come."""
        for send in self._sends.values():
            send(*flatten(None), cancel_number(self.call))

    def _forget(self) -> None:
        for store in (self._arrived, self._saved, self._gradients, self._departing):
            store.clear()

    def _explain(self, error: Exception, action: Action) -> PipeloomError:
        where = f"rank {self.rank}, stage {action.stage}, action {action}"
        if action.microbatch is not None:
            where += f", micro-batch {action.microbatch}"
        text = " ".join(str(error).split("\n")) if isinstance(error, PipeloomError) else f"{error}"
        if isinstance(error, PeerLost):
            return PeerLost(f"{where}: {text}")
        if isinstance(error, RunError):
            return RunError(f"{where}: {text}")
        return StageError(f"{where}: {type(error).__name__}: {text}")

    def _of_this_call(self, source: int, message: Message, receive: Callable[[], Message]) -> Message:
        """`message`, or the first behind it that belongs to this call; what a cancelled call left is dropped."""
        while message.call != self.call:
            if message.call == cancel_number(self.call):
                text = f"rank {source} gave up {call_name(self.call)}"
                raise CancelledError(text) if self._speculating else PeerLost(text)
            if message.call not in self._stale_calls:
                raise RunError(
                    f"rank {source} is in {call_name(message.call)}, and this rank in {call_name(self.call)}: every "
                    "rank makes the same calls in the same order"
                )
            message = receive()
        return message

    # Binding: each method returns the function of one action, and what to ask before running it without blocking.

    def _bind_forward(self, action: Action, program: Program) -> tuple[Callable[[], None], None]:
        stage, _, microbatch, piece = action
        assert microbatch is not None
        key = (stage, microbatch, piece)
        training = not program.schedule.forward_only
        module, arrived, saved = self.stages[stage], self._arrived, self._saved
        deliver = self._bind_delivery(action, program) if stage < program.schedule.num_stages - 1 else None
        loss = self._bind_loss(microbatch) if deliver is None else None
        first = stage == 0

        def forward() -> None:
            value, leaves = (self._input(microbatch), []) if first else arrived.pop(key)
            saved[key] = None
            if len(saved) > self.peak_live_activations:
                self.peak_live_activations = len(saved)
            try:
                output = module(value)
            except RuntimeError as error:
                if not leaves or "a leaf Variable that requires grad" not in str(error):
                    raise
                output = module(self._copied(stage, value))
            if deliver is not None:
                roots = deliver(output)
            else:
                assert loss is not None
                roots = loss(output)
            if training:
                saved[key] = (leaves, roots)
            else:
                del saved[key]

        return forward, None

    def _input(self, microbatch: int) -> Value:
        """The model's input; a copy where this forward may have to be done again, for stages that change theirs."""
        value = self.batch.inputs[microbatch]
        return copied(value) if self._speculating else value

    def _copied(self, stage: int, value: Value) -> Value:
        """A copy of a stage's input, which the stage changes in place; from now on it always gets one."""
        self._copies_input[stage] = True
        return copied(value)

    def _bind_loss(self, microbatch: int) -> Callable[[Value], list[Root]]:
        """What the last stage does with its output: the loss, or keeping it for the caller."""

        def finish(output: Value) -> list[Root]:
            batch = self.batch
            if batch.targets is None or self._loss_fn is None:
                batch.outputs[microbatch] = output
                return []
            loss = self._loss_fn(output, batch.targets[microbatch])
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise RunError(f"loss_fn returned {shape}: it returns one number, the mean over the micro-batch")
            if not loss.dtype.is_floating_point:
                raise RunError(f"loss_fn returned a {loss.dtype}: a mean is a floating-point number; convert it")
            batch.losses[microbatch] = loss.detach() * self._seed(batch.weights[microbatch], loss)
            return [_root(loss)] if loss.requires_grad else []

        return finish

    def _bind_delivery(self, action: Action, program: Program) -> Callable[[Value], list[Root]]:
        """What a stage does with its output: hand it to the next stage here, or lay it out for its SEND."""
        stage, _, microbatch, piece = action
        assert microbatch is not None
        here = program.placement.rank_of(stage + 1, microbatch) == self.rank
        next_key = (stage + 1, microbatch, piece)
        send = action.with_op(Op.SEND_F)
        departing, arrived = self._departing, self._arrived
        enter = self._bind_entry(stage + 1, not program.schedule.forward_only) if here else None

        def deliver(output: Value) -> list[Root]:
            layout, tensors = flatten(output)
            detached = [tensor.detach() for tensor in tensors]
            if enter is not None:
                arrived[next_key] = enter(layout, detached)
            else:
                departing[send] = (layout, detached)
            return [_root(tensor) for tensor in tensors if tensor.requires_grad]

        return deliver

    def _bind_entry(self, stage: int, training: bool) -> Callable[[Layout, list[Tensor]], tuple[Value, list[Tensor]]]:
        """How a value enters a stage: its tensors that want a gradient become leaves of a new graph."""
        copies_input = self._copies_input

        def enter(layout: Layout, tensors: list[Tensor]) -> tuple[Value, list[Tensor]]:
            if not training:
                return unflatten(layout, tensors), []
            leaves = [t.requires_grad_() for t, (_, _, wants) in zip(tensors, layout.specs, strict=True) if wants]
            if copies_input[stage]:
                tensors = [tensor.clone() for tensor in tensors]
            return unflatten(layout, tensors), leaves

        return enter

    def _bind_backward(self, action: Action, program: Program) -> tuple[Callable[[], None], None]:
        key = (action.stage, action.microbatch, action.slice)
        begin, deliver = self._bind_graph(action, program), self._bind_gradient_delivery(action, program)
        saved = self._saved

        def backward() -> None:
            leaves, roots, gradients = begin()
            if roots:
                run_backward(tuple(roots), tuple(gradients), False, False, (), True, True)
            if deliver is not None:
                deliver([leaf.grad for leaf in leaves])
            del saved[key]

        return backward, None

    def _bind_input_backward(self, action: Action, program: Program) -> tuple[Callable[[], None], None]:
        key = (action.stage, action.microbatch, action.slice)
        begin, deliver = self._bind_graph(action, program), self._bind_gradient_delivery(action, program)
        saved = self._saved

        def backward() -> None:
            leaves, roots, gradients = begin()
            input_gradients, saved[key] = backward_input(roots, gradients, leaves)
            if deliver is not None:
                deliver(input_gradients)

        return backward, None

    def _bind_weight_backward(self, action: Action, program: Program) -> tuple[Callable[[], None], None]:
        key = (action.stage, action.microbatch, action.slice)
        saved = self._saved

        def backward() -> None:
            held = saved[key]
            assert isinstance(held, WeightGradients)
            held.accumulate()
            del saved[key]

        return backward, None

    def _bind_graph(
        self, action: Action, program: Program
    ) -> Callable[[], tuple[list[Tensor], list[Root], list[Tensor]]]:
        """Where a backward ends and starts: input leaves, roots, and a gradient for each root."""
        stage, _, microbatch, piece = action
        assert microbatch is not None
        key = (stage, microbatch, piece)
        last = stage == program.schedule.num_stages - 1
        saved, arrived = self._saved, self._gradients

        def begin() -> tuple[list[Tensor], list[Root], list[Tensor]]:
            held = saved[key]
            assert isinstance(held, tuple)
            leaves, roots = held
            given: Sequence[Tensor | None]
            if last:
                given = [self._seed(self.batch.weights[microbatch], self.batch.losses[microbatch])] if roots else ()
            else:
                given = arrived.pop(key)
            pairs = [(root, gradient) for root, gradient in zip(roots, given, strict=True) if gradient is not None]
            return leaves, [root for root, _ in pairs], [gradient for _, gradient in pairs]

        return begin

    def _bind_gradient_delivery(
        self, action: Action, program: Program
    ) -> Callable[[Sequence[Tensor | None]], None] | None:
        """What a stage does with the gradients of its inputs: hand them to the stage before, or lay them out."""
        stage, _, microbatch, piece = action
        assert microbatch is not None
        if stage == 0:
            return None
        gradients, departing = self._gradients, self._departing
        before, send = (stage - 1, microbatch, piece), action.with_op(Op.SEND_B)
        here = program.placement.rank_of(stage - 1, microbatch) == self.rank

        def deliver(found: Sequence[Tensor | None]) -> None:
            if here:
                gradients[before] = found
            else:
                departing[send] = flatten(found[0] if len(found) == 1 else tuple(found))

        return deliver

    def _seed(self, weight: float, like: Tensor) -> Tensor:
        """The gradient of the whole step's loss by one micro-batch's loss."""
        key = (weight, like.dtype, like.device)
        seed = self._seeds.get(key)
        if seed is None or seed.shape != like.shape:
            seed = self._seeds[key] = torch.full_like(like, weight, requires_grad=False)
        return seed

    def _bind_send(self, action: Action, program: Program) -> tuple[Callable[[], None], None]:
        channel = Channel(self.rank, peer_of(action, program.placement), Lane.PIPELINE)
        end, departing = self._transport.outgoing(channel).send, self._departing
        self._sends[channel] = end

        def send() -> None:
            layout, tensors = departing.pop(action)
            end(layout, tensors, self.call)

        return send, None

    def _bind_receive(self, action: Action, program: Program) -> tuple[Callable[[], None], Callable[[], bool]]:
        stage, op, microbatch, piece = action
        key = (stage, microbatch, piece)
        channel = Channel(peer_of(action, program.placement), self.rank, Lane.PIPELINE)
        end = self._transport.incoming(channel)
        next_message, arrived, gradients = end.receive, self._arrived, self._gradients
        if op is Op.RECV_F:
            enter = self._bind_entry(stage, not program.schedule.forward_only)

            def receive() -> None:
                message = next_message()
                if message.call != self.call:
                    message = self._of_this_call(channel.source, message, next_message)
                arrived[key] = enter(message.layout, message.tensors)
        else:

            def receive() -> None:
                message = next_message()
                if message.call != self.call:
                    message = self._of_this_call(channel.source, message, next_message)
                value = unflatten(message.layout, message.tensors)
                gradients[key] = value if isinstance(value, tuple) else (value,)

        return receive, end.ready


def _root(tensor: Tensor) -> Root:
    """Where a backward starts. The edge of the graph keeps no numbers alive, unlike the tensor."""
    node = tensor.grad_fn
    if node is None:
        return tensor
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return get_gradient_edge(tensor)  # the graph of a Python function needs a token to stay alive
    return GradientEdge(node, tensor.output_nr)


_BINDERS: dict[Op, Callable[[Worker, Action, Program], tuple[Callable[[], None], Callable[[], bool] | None]]] = {
    Op.F: Worker._bind_forward,
    Op.B: Worker._bind_backward,
    Op.I: Worker._bind_input_backward,
    Op.W: Worker._bind_weight_backward,
    Op.SEND_F: Worker._bind_send,
    Op.SEND_B: Worker._bind_send,
    Op.RECV_F: Worker._bind_receive,
    Op.RECV_B: Worker._bind_receive,
}
RUNNABLE_OPS = frozenset(_BINDERS) | {Op.REDUCE_GRAD}
