"""Runs one batch through a pipe."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from pipeloom.autograd.auxiliary_losses import DeclaredLoss, auxiliary_loss, collecting, observe
from pipeloom.common.overlaps import overlapping
from pipeloom.errors import InputError, RunError
from pipeloom.pipe.batch_graph import BatchGraph, connect
from pipeloom.pipe.calls.buffers import Norm
from pipeloom.pipe.calls.devices import mark
from pipeloom.pipe.calls.modes import ThreadModes
from pipeloom.pipe.calls.randomness import BatchRandomness, Randomness
from pipeloom.pipe.calls.stage_call import StageCall
from pipeloom.pipe.calls.stage_values import Output, Partition, Sent
from pipeloom.pipe.calls.used_tensors import UsedTensors
from pipeloom.pipe.forward_run import ForwardRun
from pipeloom.pipe.micro_batches import Value, first_places, gather, split, tensors_of
from pipeloom.pipe.skips import SkipRoutes
from pipeloom.pipe.workers import Workers


class PipeModel(NamedTuple):
    """What a batch needs of a pipe."""

    partitions: Sequence[Partition]
    routes: SkipRoutes
    workers: Workers
    randomness: Randomness


def run_batch(model: PipeModel, value: Value, chunks: int, checkpoint: str) -> Value:
    """The model's output for a batch, with a graph.

    Args:
        model: of the pipe.
        value: the input of the batch.
        chunks: the most micro-batches.
        checkpoint: "always", "except_last" or "never".
    """
    tensors = tensors_of(value)
    detached = {id(tensor): tensor.detach() for tensor in tensors}
    inputs = split([detached[id(tensor)] for tensor in tensors], chunks)
    modes = ThreadModes()
    training = any(partition.module.training for partition in model.partitions)
    randomness = BatchRandomness(model.randomness, training=training, num_microbatches=len(inputs))
    collects = collecting()
    parameters = [_parameters(partition) if modes.gradients else [] for partition in model.partitions]
    used = [UsedTensors(partition.module) for partition in model.partitions]
    kept = {"always": 0, "except_last": 1, "never": len(inputs)}[checkpoint]
    calls = [
        [
            StageCall(
                partition,
                microbatch,
                own,
                held,
                recompute=microbatch < len(inputs) - kept,
                modes=modes,
                randomness=randomness,
                collects=collects,
            )
            for partition, own, held in zip(model.partitions, parameters, used, strict=True)
        ]
        for microbatch in range(len(inputs))
    ]
    run = ForwardRun(model.workers, calls, model.routes, randomness)
    moments, overlaps = [mark(tensor.device) for tensor in tensors], overlapping(tensors)
    sent = [
        [
            Sent(part, tensor.requires_grad and modes.gradients, ready, other)
            for part, tensor, ready, other in zip(parts, tensors, moments, overlaps, strict=True)
        ]
        for parts in inputs
    ]
    run.start(sent, atomic=isinstance(value, Tensor))
    run.wait()
    if randomness.finish() and any(call.recompute for each in calls for call in each):
        # A layer, or another thread, drew between the numbers of a stage: a recomputation would draw other ones.
        _check_repeatable(model.partitions)
        return run_batch(model, value, chunks, checkpoint)  # in which stages take turns
    graph = BatchGraph(model.workers, calls, model.routes, inputs, run.outputs)
    sources = [*tensors, *(parameter for own in parameters for parameter in own)]
    return _result(graph, run.outputs, sources, gradients=modes.gradients)


def _check_repeatable(partitions: Sequence[Partition]) -> None:
    """Check that a forward can run twice; what changes other buffers is not recomputed (`BufferCheck`).

    Raises:
        RunError: it would update running statistics twice.
    """
    norms = (part for each in partitions for part in each.module.modules() if isinstance(part, Norm))
    if any(norm.training and norm.running_mean is not None for norm in norms):
        raise RunError(
            "random numbers were drawn while stages ran at the same time, for the first time in this pipe: their "
            "recomputation would draw other ones. Run the batch again: stages now take turns."
        )


def _parameters(partition: Partition) -> list[Tensor]:
    """The parameters of a partition that require gradients."""
    found: list[Tensor] = []
    for name, parameter in partition.module.named_parameters():
        if parameter.device != partition.device:
            raise InputError(
                f"parameter {name!r} is on {parameter.device}, its partition on {partition.device}: a Pipe stays on "
                "its devices. Do not move the module that it is in."
            )
        if parameter.requires_grad:
            found.append(parameter)
    return found


def _result(graph: BatchGraph, outputs: list[list[Output]], sources: list[Tensor], *, gradients: bool) -> Value:
    """The output of the batch, with a graph; auxiliary losses and observed quantities are declared in this thread."""
    last = [each[-1] for each in outputs]
    values = [
        tuple(sent.tensor for sent in each.tensors) if not each.atomic else each.tensors[0].tensor for each in last
    ]
    gathered = gather(values)
    places = first_places([tensors_of(value) for value in values])
    distinct = [index for index, place in enumerate(places) if place == index]
    tensors = [tensors_of(gathered)[index] for index in distinct]
    differentiable = [any(each.tensors[index].differentiable for each in last) for index in distinct]
    losses = _losses(graph, outputs)
    requires = gradients and any(source.requires_grad for source in sources)
    found = [*tensors, *(value for value, _ in losses)]
    if requires:
        found = connect(graph, sources, found, [*differentiable, *(True for _ in losses)])
    for value, (_, declared) in zip(found[len(tensors) :], losses, strict=True):
        auxiliary_loss(value, declared.weight, declared.name, module=declared.module)
    for each in outputs:
        for output in each:
            for quantity in output.observed:
                observe(quantity.name, quantity.values, module=quantity.module)
    return found[0] if isinstance(gathered, Tensor) else tuple(found[distinct.index(place)] for place in places)


def _losses(graph: BatchGraph, outputs: list[list[Output]]) -> list[tuple[Tensor, DeclaredLoss]]:
    """The auxiliary losses of the batch: means over its micro-batches, weighted by their sizes."""
    found = []
    for stage in range(len(outputs[0])):
        columns = [each[stage].losses for each in outputs]
        if len({len(column) for column in columns}) > 1:
            raise InputError("the layers declare another number of auxiliary losses for some micro-batches.")
        for losses in zip(*columns, strict=True):
            terms = [loss.value * share for loss, share in zip(losses, graph.shares, strict=True)]
            found.append((sum(terms[1:], terms[0]), losses[0]))
    return found
