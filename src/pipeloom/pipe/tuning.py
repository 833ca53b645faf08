"""Finds the number of micro-batches by experiment."""

from collections.abc import Callable, Sequence
from statistics import quantiles
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.pipe.micro_batches import Value, num_microbatches, tensors_of
from pipeloom.pipe.pipe import Pipe


class ChunkTime(NamedTuple):
    """Seconds per step with a number of micro-batches: median and quartiles over the rounds."""

    chunks: int
    median: float
    low: float
    high: float


def measure_chunks(
    module: nn.Sequential,
    inputs: Value,
    numbers: Sequence[int] | None = None,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    rounds: int = 5,
    **options: Any,
) -> list[ChunkTime]:
    """Time a training step (forward, loss, backward) of a `Pipe` for several numbers of micro-batches.

    Numbers take turns within each round, so that other load on the machine affects all of them. A round before the
    measured ones is dropped. Gradients are removed afterwards.

    Args:
        module: the model.
        inputs: a batch.
        numbers: numbers of micro-batches to compare; None: powers of two up to 64 and to the batch size.
        loss_fn: from the output to a scalar; None: the mean of squares.
        rounds: measured steps per number.
        options: of `Pipe`, such as balance, devices, checkpoint.

    Raises:
        InputError: a number that is no positive integer or exceeds the batch size, or no rounds.
    """
    largest = min(len(tensor) for tensor in tensors_of(inputs))
    if numbers is None:
        numbers = [2**power for power in range(7) if 2**power <= max(1, largest)]
    if not numbers or rounds < 1:
        raise InputError(f"rounds={rounds}, chunks={list(numbers)}: at least one round and one number are needed.")
    for number in numbers:
        if number < 1 or num_microbatches(inputs, number) != number:
            raise InputError(f"chunks={number}: a batch of {largest} does not split into {number} micro-batches.")
    first = Pipe(module, chunks=numbers[0], **{"sample": inputs, **options})
    same = {**options, "balance": first.balance, "devices": first.devices}
    pipes = {number: Pipe(module, chunks=number, **same) for number in numbers}
    seconds: dict[int, list[float]] = {number: [] for number in numbers}
    for _ in range(rounds + 1):
        for number, pipe in pipes.items():
            seconds[number].append(_step(pipe, inputs, loss_fn or _mean_square))
    for parameter in module.parameters():
        parameter.grad = None
    found = []
    for number, times in seconds.items():
        low, median, high = quantiles(times[1:], n=4, method="inclusive") if rounds > 1 else times[1:] * 3
        found.append(ChunkTime(number, median, low, high))
    return found


def _step(pipe: Pipe, inputs: Value, loss_fn: Callable[[Any], Tensor]) -> float:
    for parameter in pipe.parameters():
        parameter.grad = None
    _synchronize(pipe)
    begin = perf_counter()
    loss_fn(pipe(inputs)).backward()  # type: ignore[no-untyped-call]
    _synchronize(pipe)
    return perf_counter() - begin


def _synchronize(pipe: Pipe) -> None:
    for device in pipe.devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _mean_square(output: Value) -> Tensor:
    terms = [each.float().square().mean() for each in tensors_of(output) if each.requires_grad]
    if not terms:
        raise InputError("no output of the model requires gradients: a step has no backward. Give a loss function.")
    return sum(terms[1:], terms[0])
