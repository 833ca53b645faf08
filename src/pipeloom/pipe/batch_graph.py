"""The graph through which autograd runs the backwards of a batch.

The graph of the user's output has one node for each call, in the order of the schedule. Empty tensors, called tokens,
connect the nodes; values and gradients go between the partitions' threads::

    inputs, parameters -- Enter --+-- Backward 0,0 -- Backward 0,1 --+-- Leave -- outputs
                                  +-- Backward 1,0 -- Backward 1,1 --+

autograd visits the nodes in the reverse order of their creation: the schedule runs backwards. A visit hands a step to
the partition's thread (`BackwardRun`) and returns; Enter waits for all steps and gives their gradients to autograd. So
hooks of parameters and inputs run once per batch, and ``torch.autograd.grad`` works. A recomputed call has two nodes,
Recompute and Checkpoint.

Tokens are on the CPU. So Enter waits in the thread that called the backward, never in a thread that autograd needs for
the backwards of a device.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.pipe.backward_run import BackwardRun
from pipeloom.pipe.calls.devices import mark
from pipeloom.pipe.calls.stage_call import StageCall
from pipeloom.pipe.calls.stage_values import Output
from pipeloom.pipe.micro_batches import first_places
from pipeloom.pipe.skips import SkipRoutes
from pipeloom.pipe.workers import Workers

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph


class BatchGraph:
    """What the nodes of one batch share.

    Args:
        workers: the threads.
        calls: for each micro-batch, its calls.
        routes: of the skips.
        inputs: for each micro-batch, the tensors of the pipe's input.
        outputs: for each micro-batch, what each partition gave.

    Attributes:
        shares: each micro-batch's share of the batch.
    """

    def __init__(
        self,
        workers: Workers,
        calls: Sequence[Sequence[StageCall]],
        routes: SkipRoutes,
        inputs: Sequence[Sequence[Tensor]],
        outputs: Sequence[Sequence[Output]],
    ) -> None:
        self._workers = workers
        self.calls = calls
        self._routes = routes
        self._inputs = [[(each.shape, each.device) for each in tensors] for tensors in inputs]
        sizes = [len(tensors[0]) if tensors else 1 for tensors in inputs]
        self.shares = [size / max(1, sum(sizes)) for size in sizes]
        last = [[sent.tensor for sent in each[-1].tensors] for each in outputs]
        self._places = first_places(last)
        self._sizes = [[len(tensor) if tensor.dim() else 1 for tensor in tensors] for tensors in last]
        self._num_losses = [len(each.losses) for each in outputs[0]]
        self._run: BackwardRun | None = None

    def begin(self, gradients: Sequence[Tensor | None]) -> None:
        """Start a backward, from the gradients of the outputs and of the auxiliary losses.

        Raises:
            RunError: the backward shall have a graph of its own.
        """
        if torch.is_grad_enabled():
            raise RunError(
                "create_graph=True: the backward of a Pipe has no graph of its own. Compute second derivatives outside "
                "of the pipe."
            )
        run = self._run = BackwardRun(self._workers, self.calls, self._routes, keep=_keeps_graph())
        distinct = [index for index, place in enumerate(self._places) if place == index]
        num_outputs = len(distinct)
        columns: list[Sequence[Tensor | None]] = [[None] * len(self.calls) for _ in self._places]
        for index, gradient in zip(distinct, gradients[:num_outputs], strict=True):
            columns[index] = self._split(index, gradient)
        ready = next((mark(each.device) for each in gradients if each is not None), None)
        for microbatch, given in enumerate(run.given):
            of_losses = iter(gradients[num_outputs:])
            for stage, number in enumerate(self._num_losses):
                mine = [next(of_losses) for _ in range(number)]
                given[stage].losses = [None if each is None else each * self.shares[microbatch] for each in mine]
            given[-1].tensors = [column[microbatch] for column in columns]
            given[-1].ready = ready

    def _split(self, index: int, gradient: Tensor | None) -> Sequence[Tensor | None]:
        """The gradient of an output, per micro-batch."""
        sizes = [each[index] for each in self._sizes]
        if gradient is None or len(sizes) == 1:
            return [gradient] * len(sizes)
        parts: Sequence[Tensor] = gradient.split(sizes)  # type: ignore[no-untyped-call]
        return parts

    def submit(self, microbatch: int, stage: int, *, recomputes: bool) -> None:
        """A step of the backward that began."""
        if self._run is not None:
            self._run.submit(microbatch, stage, recomputes=recomputes)

    def finish(self) -> list[Tensor | None]:
        """Wait for the backward; returns the gradients of the inputs, then those of the parameters."""
        run, self._run = self._run, None
        if run is None:
            return []
        run.wait()
        of_inputs = zip(*(tensors for tensors, _ in run.inputs), strict=True)
        found = [self._join(index, gradients) for index, gradients in enumerate(of_inputs)]
        return [*found, *(gradient for each in run.parameters for gradient in each)]

    def _join(self, index: int, gradients: Sequence[Tensor | None]) -> Tensor | None:
        """The gradient of an input: that of its micro-batches, joined."""
        first = next((each for each in gradients if each is not None), None)
        if first is None:
            return None
        device = self._inputs[0][index][1]
        parts = [
            first.new_zeros(tensors[index][0]) if each is None else each
            for each, tensors in zip(gradients, self._inputs, strict=True)
        ]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(device)


class Enter(torch.autograd.Function):
    """Where the graph of a batch begins: its backward gives the gradients of inputs and parameters."""

    @staticmethod
    def forward(ctx: Any, graph: BatchGraph, *tensors: Tensor) -> Tensor:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return (None, *ctx.graph.finish())


class _Call(torch.autograd.Function):
    """A node of one call, which hands on the token."""

    recomputes = False

    @staticmethod
    def forward(ctx: Any, graph: BatchGraph, microbatch: int, stage: int, token: Tensor) -> Tensor:
        ctx.graph, ctx.place = graph, (microbatch, stage)
        return token.detach()

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        ctx.graph.submit(*ctx.place, recomputes=False)
        return None, None, None, token


class Backward(_Call):
    """A call whose forward kept its graph."""


class Checkpoint(_Call):
    """The backward of a call that runs its forward again."""


class Recompute(_Call):
    """The recomputation of a call; autograd visits it before its `Checkpoint`."""

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        ctx.graph.submit(*ctx.place, recomputes=True)
        return None, None, None, token


class Leave(torch.autograd.Function):
    """Where the graph of a batch ends: its backward starts from the gradients of the outputs."""

    @staticmethod
    def forward(
        ctx: Any, graph: BatchGraph, outputs: Sequence[Tensor], fixed: Sequence[Tensor], *tokens: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.graph = graph
        ctx.num_tokens = len(tokens)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fixed)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        ctx.graph.begin(gradients)
        return (None, None, None, *(torch.empty(0) for _ in range(ctx.num_tokens)))


def schedule(num_microbatches: int, num_stages: int) -> Iterator[tuple[int, int]]:
    """The calls (micro-batch, partition) of the schedule, column by column."""
    for column in range(num_microbatches + num_stages - 1):
        for stage in range(num_stages):
            if 0 <= column - stage < num_microbatches:
                yield column - stage, stage


def connect(
    graph: BatchGraph, sources: Sequence[Tensor], outputs: Sequence[Tensor], differentiable: Sequence[bool]
) -> list[Tensor]:
    """The outputs, with a graph.

    Args:
        graph: of the batch.
        sources: tensors of the input, then the parameters of all partitions that require gradients.
        outputs: distinct outputs of the batch, then its auxiliary losses.
        differentiable: for each of them, whether it requires gradients.
    """
    begin: Tensor = Enter.apply(graph, *sources)  # type: ignore[no-untyped-call]
    tokens = [begin] * len(graph.calls)
    for microbatch, stage in schedule(len(graph.calls), len(graph.calls[0])):
        kinds = [Checkpoint, Recompute] if graph.calls[microbatch][stage].recompute else [Backward]
        for kind in kinds:
            tokens[microbatch] = kind.apply(graph, microbatch, stage, tokens[microbatch])  # type: ignore[no-untyped-call]
    fixed = [output for output, requires in zip(outputs, differentiable, strict=True) if not requires]
    return list(Leave.apply(graph, outputs, fixed, *tokens))  # type: ignore[no-untyped-call]
