"""`Decoding`: one rank's forwards of its stages, token after token.

    rank 0   0 1 2 3 . 0 1 2 3 .      forwards of four micro-batches, once per token
    rank 1     0 1 2 3 . 0 1 2 3      its last stage chooses tokens, and sends them to every rank

A rank begins the next token of a micro-batch as soon as it has this one's: other micro-batches are still further down.
The order is that of the forwards of a step, so it cannot hang.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from pipeloom.engine.batch import Batch
from pipeloom.engine.executor import Executor
from pipeloom.engine.instructions import Run
from pipeloom.engine.worker import Bound, Worker
from pipeloom.ir import Op
from pipeloom.ir.action import COMMUNICATION_OPS
from pipeloom.parallel.tensor.one_d.logits import full_logits
from pipeloom.training.generation.sampling import Draws
from pipeloom.training.generation.sequences import Sequences
from pipeloom.transport.call_numbers import call_only, out_of_step
from pipeloom.transport.interface import Channel, Lane
from pipeloom.transport.values import flatten, unflatten

_SKIPPED = COMMUNICATION_OPS | {Op.F}  # of a micro-batch whose sequences have ended


class Task(NamedTuple):
    """What all ranks decode.

    Attributes:
        make_sequences: makes the sequences of a micro-batch from its prompt.
        generator: of random numbers; None: torch's default.
        stops: whether ranks stop once all sequences have ended.
    """

    make_sequences: Callable[[nn.Module, Mapping[str, Any]], Sequences]
    generator: Any
    stops: bool


class Decoding:
    """The part of one rank.

    Args:
        task: what to decode.
        worker, bound: the rank, and the forwards of its stages.
        batch: prompts, on ranks with the first stage.
        call: number of the call.
        shared: whether all ranks are in this process, with one batch.

    Attributes:
        sequences: by micro-batch.
    """

    def __init__(self, task: Task, worker: Worker, bound: Bound, batch: Batch, call: int, *, shared: bool) -> None:
        self._task, self._worker, self._bound, self._batch, self._call = task, worker, bound, batch, call
        self._shared = shared
        program = bound.program
        self._place, self._count = program.placement, program.num_microbatches
        self._last = program.schedule.num_stages - 1
        self._prompts: Sequence[Mapping[str, Any]] = tuple(batch.inputs)  # ranks of one process share the batch
        self._inputs: Any = batch.inputs
        self.sequences: list[Sequences] = []
        self._arrived: list[deque[tuple[Tensor, bool]]] = [deque() for _ in range(self._count)]
        self._taken = [0] * self._count  # tokens that this rank has, by micro-batch

    def run(self) -> Run:
        """Decode; yields whenever it has to wait and the transport does not block."""
        task = self._task
        with self._worker.evaluating(self._bound, self._batch, self._call):
            yield from self._begin()
            count = self.sequences[0].max_new_tokens  # all prompts have one length
            for number in range(count):
                yield from self._forwards(number)
                if task.stops and all(each.ended for each in self.sequences):
                    break
            for microbatch in range(self._count):
                yield from self._take(microbatch, count)

    def _begin(self) -> Run:
        first = self._place.rank_of(0, 0)
        prompts = self._prompts
        if not self._shared:
            if self._worker.rank == first:
                message = flatten(tuple(prompts))
                for peer in range(self._place.num_ranks):
                    if peer != first:
                        self._end(first, peer).send(*message, self._call)
            else:
                prompts = yield from self._receive(first)
        some_stage = next(iter(self._worker.stages.values()))
        self.sequences = [self._task.make_sequences(some_stage, prompt) for prompt in prompts]
        rows = [len(each.ids) for each in self.sequences]
        self._rows = [sum(rows[:b]) for b in range(self._count)]
        self._draws = Draws(sum(rows), self._count, self._task.generator)

    def _forwards(self, number: int) -> Run:
        for index, instruction in enumerate(self._bound.instructions):
            action, microbatch = instruction.action, instruction.action.microbatch
            if microbatch is not None and action.op in _SKIPPED:
                yield from self._take(microbatch, number)
                if self._task.stops and self.sequences[microbatch].ended:
                    continue
            while instruction.ready is not None and not instruction.ready():
                yield
            if action.op is not Op.F:
                yield from self._bound.instructions.run(index, index + 1)
                continue
            assert microbatch is not None
            sequences, stage = self.sequences[microbatch], self._worker.stages[action.stage]
            if action.stage == 0:
                self._inputs[microbatch] = sequences.inputs(stage)
            with sequences.caching(stage):
                yield from self._bound.instructions.run(index, index + 1)
            if action.stage == self._last:
                output = self._batch.outputs.pop(microbatch)
                logits = full_logits(output["logits"] if isinstance(output, Mapping) else output)
                self._send(microbatch, *sequences.choose(logits, self._draws, self._rows[microbatch], number))

    def _send(self, microbatch: int, tokens: Tensor, ended: bool) -> None:
        self._arrived[microbatch].append((tokens, ended))
        message = flatten((microbatch, tokens, ended))
        for peer in range(self._place.num_ranks):
            if peer != self._worker.rank:
                self._end(self._worker.rank, peer).send(*message, self._call)

    def _take(self, microbatch: int, number: int) -> Run:
        """Add the tokens of a micro-batch to its sequences, until they have `number` or have ended."""
        sequences, holder = self.sequences[microbatch], self._place.rank_of(self._last, microbatch)
        while self._taken[microbatch] < number and not (self._task.stops and sequences.ended):
            while not self._arrived[microbatch]:
                arrived, tokens, ended = yield from self._receive(holder)
                self._arrived[arrived].append((tokens, ended))
            tokens, ended = self._arrived[microbatch].popleft()
            sequences.append(tokens, ended=ended)
            self._taken[microbatch] += 1

    def _end(self, source: int, target: int) -> Any:
        transport = self._worker.state.wiring.transport
        channel = Channel(source, target, Lane.RESULT)
        return transport.outgoing(channel) if source == self._worker.rank else transport.incoming(channel)

    def _receive(self, source: int) -> Any:
        end = self._end(source, self._worker.rank)
        while not self._worker.state.wiring.transport.blocking and not end.ready():
            yield
        message = end.receive()
        if call_only(message.call) != call_only(self._call):
            raise out_of_step(source, message.call, self._call)
        return unflatten(message.layout, message.tensors)


def token_channels(executor: Executor) -> set[Channel]:
    """The channels of prompts and tokens, on all ranks."""
    place = executor.programs.forward.placement
    ranks = range(place.num_ranks)
    sources = {place.rank_of(0, 0), *place.replicas[-1]}
    return {Channel(source, target, Lane.RESULT) for source in sources for target in ranks if source != target}
