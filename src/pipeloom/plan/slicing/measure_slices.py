"""Measure the cost of slices on this machine: forward and backward of a stage, run as in a pipeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pipeloom.errors import InputError
from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.plan.slicing.slice_costs import Sample, SliceCosts, fit
from pipeloom.slicing import SliceContext, make_sliceable
from pipeloom.split import StageModule
from pipeloom.split.profile import Clock, steady_timer, threads_of_a_rank, time_once, untouched

_LONG_SECONDS = 0.1  # forward and backward of a slice; longer ones run once, since their warm-up is a small share
_MOST_SECONDS = 1.0  # of a slice; larger batches are not measured after it


class Measured(NamedTuple):
    """Fitted costs, and the root mean square of the relative error over the slices with context."""

    costs: SliceCosts
    forward_error: float
    backward_error: float


def measure_slices(config: GPTConfig, *, num_ranks: int, grid: int = 8, piece: int = 1, batch: int = 1) -> Measured:
    """Costs of slices of sequences of ``config.sequence_length`` tokens on a rank of pipeloom's GPT.

    The measured rank has the most blocks; embedding and head are left out.

    Args:
        config: sizes of the model.
        num_ranks: pipeline-parallel degree.
        grid, piece, batch: as for `measure_stage_slices`.

    Raises:
        InputError: more ranks than blocks.
    """
    if num_ranks > config.layers:
        raise InputError(
            f"num_ranks={num_ranks}: the model has {config.layers} blocks, and each rank needs one. Use fewer ranks."
        )
    with torch.random.fork_rng(devices=[]):
        model = GPT(replace(config, layers=-(-config.layers // num_ranks)))
        init_parameters(model, seed=0)
        return measure_stage_slices(
            StageModule((f"blocks.{index}", block) for index, block in enumerate(model.blocks)),
            lambda samples, tokens: torch.randn(samples, tokens, config.width),
            sequence=config.sequence_length,
            num_ranks=num_ranks,
            grid=grid,
            piece=piece,
            batch=batch,
        )


def measure_stage_slices(
    stage: nn.Module,
    sample: Callable[[int, int], Any],
    *,
    sequence: int,
    num_ranks: int,
    grid: int = 8,
    piece: int = 1,
    batch: int = 1,
    num_rounds: int = 3,
) -> Measured:
    """Measured and fitted costs of slices of a sequence, for any stage that can be sliced.

    It computes with the threads that the launcher gives each of `num_ranks` ranks of this machine. With one thread, the
    CPU time of the thread is measured, so background load disturbs little. A message costs a copy of the stage's output
    in and out.

    Args:
        stage: a stage of `pipeloom.split.split`, or of a Hugging Face decoder; `make_sliceable` prepares it.
        sample: ``sample(samples, tokens)`` makes an input of the stage: tensors [samples, tokens, ...], or of one
            dimension.
        sequence: sequence length in tokens.
        num_ranks: ranks on this machine.
        grid: shortest slice in tokens.
        piece: sequences that are sliced together; they count as one in the costs.
        batch: maximum pieces that run together in a slice.
        num_rounds: measured runs per slice after one warm-up run, whose median is taken; long slices run once.

    Raises:
        InputError: the stage cannot be sliced. SplitError: it has no values.
    """
    make_sliceable(stage)
    forward: list[Sample] = []
    backward: list[Sample] = []

    def add(samples: int, length: int, context: int) -> int:
        value = sample(samples, sequence)
        clock = Clock([stage], value, steady_timer())
        with untouched([stage], clock.cuda):
            runs = [_run(stage, value, sequence, length, context, clock)]
            if runs[0].forward + runs[0].backward < _LONG_SECONDS:
                runs = [_run(stage, value, sequence, length, context, clock) for _ in range(num_rounds)]
        forward.append(Sample(samples // piece * length, context, median(run.forward for run in runs)))
        backward.append(Sample(samples // piece * length, context, median(run.backward for run in runs)))
        return runs[-1].token_bytes

    with threads_of_a_rank(num_ranks), torch.random.fork_rng(devices=[]):
        for length, context in _points(sequence, grid):
            token_bytes = add(piece, length, context)
        latency, per_token = _message(token_bytes, sequence)
        size = 1
        while size < batch and forward[-1].seconds + backward[-1].seconds < _MOST_SECONDS:
            size = min(2 * size, batch)
            add(size * piece, sequence, 0)
    (there_form, forward_error), (back_form, backward_error) = fit(forward), fit(backward)
    costs = SliceCosts(forward=there_form, backward=back_form, latency=latency, seconds_per_token_sent=per_token)
    return Measured(costs, forward_error, backward_error)


class _InSlice(nn.Module):
    """A stage on tokens `start` to `end` of its context, as `time_once` calls it."""

    def __init__(self, stage: nn.Module, context: SliceContext, index: int, start: int, end: int, length: int) -> None:
        super().__init__()
        self.stage = stage
        self.entered = partial(context.slice, index, start, end, length)
        self._tokens = slice(start, end)

    def forward(self, value: Any) -> Any:
        with self.entered():
            return self.stage(value)

    def cut(self, value: Any) -> Any:
        """The slice's part of the sequences in a value."""
        return tree_map(lambda leaf: leaf[:, self._tokens] if _has_tokens(leaf) else leaf, value)


class _Timed(NamedTuple):
    """Seconds of a slice, and the bytes of its output per token, over all samples."""

    forward: float
    backward: float
    token_bytes: int


def _run(stage: nn.Module, value: Any, sequence: int, length: int, context: int, clock: Clock) -> _Timed:
    """One slice, after a slice of all earlier tokens, and before a slice of one token unless the sequence ends.

    The earlier slice leaves keys and values. The later slice runs its backward first, and leaves their gradients.
    """
    end = context + length
    whole = min(end + 1, sequence)
    shared = SliceContext()
    places = [(a, b) for a, b in ((0, context), (context, end), (end, whole)) if a < b]
    pieces = [_InSlice(stage, shared, index, a, b, whole) for index, (a, b) in enumerate(places)]
    index = places.index((context, end))

    @contextmanager
    def behind() -> Iterator[None]:
        for later in pieces[index + 1 :]:
            time_once(later, later.cut(value), clock, around_backward=later.entered)
        with pieces[index].entered():
            yield

    with torch.no_grad():
        for earlier in pieces[:index]:
            earlier(earlier.cut(value))
    forward, backward, output = time_once(pieces[index], pieces[index].cut(value), clock, around_backward=behind)
    shared.close()
    return _Timed(forward, backward, sum(leaf.nbytes for leaf in tree_leaves(output) if _has_tokens(leaf)) // length)


def _has_tokens(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 1


def _points(sequence: int, grid: int) -> Iterator[tuple[int, int]]:
    """Lengths and contexts to measure: lengths grow by about 1.5, each alone and after some contexts."""
    lengths = {min(grid, sequence), sequence}
    length = float(grid)
    while length < sequence:
        lengths.add(max(grid, round(length / grid) * grid))
        length *= 1.5
    for tokens in sorted(each for each in lengths if each <= sequence):
        yield tokens, 0
    for quarter in (1, 2, 3):
        context = quarter * sequence // 4
        room = sequence - context
        for part in (16, 4, 2, 1):
            if context and room // part:
                yield room // part, context


def _message(token_bytes: int, sequence: int) -> tuple[float, float]:
    """Seconds of a copy in and out: of an almost empty message, and per further token."""

    def copy(tokens: int) -> float:
        source, target = torch.ones(2, tokens, token_bytes, dtype=torch.uint8)
        times, now = [], steady_timer()
        for _ in range(7):
            start = now()
            target.copy_(source)
            source.copy_(target)
            times.append(now() - start)
        return median(times)

    short, long = copy(1), copy(max(2, sequence))
    return short, max(0.0, long - short) / max(1, sequence - 1)
