"""Validates the options of tensor and context parallelism, which share the stages of a replica. No torch."""

import math

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either
from pipeloom.ir import Schedule
from pipeloom.parallel.inside_stage import InsideStage
from pipeloom.parallel.tensor.grids.shape import GridShape
from pipeloom.train.config.schedule import slice_lengths
from pipeloom.train.config.train_config import TrainConfig


def inside_stage(config: TrainConfig) -> InsideStage:
    """The processes that share a stage of a replica."""
    parallel = config.parallel
    return InsideStage(
        tensor=parallel.tensor,
        layout=parallel.tensor_layout,
        depth=parallel.tensor_depth,
        sequence=parallel.sequence,
        context=parallel.context,
        context_kind=parallel.context_kind,
        expert=parallel.expert,
        expert_axes=config.expert_axes,
        exchange=parallel.expert_exchange,
    )


def check_inside_stage(config: TrainConfig, schedule: Schedule) -> None:
    """Validate that layers, sequences and batches can be shared as configured.

    Raises:
        InputError: the first option that does not fit, with what would.
    """
    if config.stage_processes == 1:
        return
    parallel = config.parallel
    name = "tensor" if parallel.tensor > 1 else "context"
    asked = f"parallel.{name}={getattr(parallel, name)}"
    if not config.optimizer.barrier:
        raise InputError(
            f"optimizer.barrier=false: does not work with {asked}: updates without a barrier do not support processes "
            f"that share a stage. Remove optimizer.barrier, or parallel.{name}."
        )
    if parallel.tensor > 1:
        _check_tensor(config)
    if parallel.context > 1:
        _check_context(config, schedule)


def _check_tensor(config: TrainConfig) -> None:
    parallel, model = config.parallel, config.model
    degree, layout = parallel.tensor, parallel.tensor_layout
    if layout != "2.5d" and parallel.tensor_depth is not None:
        raise InputError(
            f"parallel.tensor_depth={parallel.tensor_depth}: has no effect with parallel.tensor_layout={layout}. "
            "Remove it, or use 2.5d."
        )
    if layout == "2.5d" and parallel.tensor_depth is None:
        raise InputError(
            f"parallel.tensor_depth is missing: parallel.tensor={degree} with parallel.tensor_layout=2.5d is depth * q "
            "* q processes. Add parallel.tensor_depth, from 1 to q."
        )
    if parallel.sequence and layout != "1d":
        raise InputError(
            f"parallel.sequence=true: works with parallel.tensor_layout=1d alone, not {layout}. Remove it, or use 1d."
        )
    if layout != "1d":
        _check_grid(config, GridShape.of(degree, layout, parallel.tensor_depth))
        return
    heads, keys = (model.heads, model.kv_heads) if config.facts is None else (config.facts.heads, config.facts.kv_heads)
    if heads is None:  # then `parallelize` says what does not fit
        return
    _check_multiple("model.heads", heads, degree, f"parallel.tensor={degree}")
    keys = keys or heads
    if keys % degree and degree % keys:
        raise InputError(
            f"model.kv_heads={keys}: must divide parallel.tensor={degree}, or be a multiple of it. Use "
            f"{degree if heads % degree == 0 else heads}."
        )
    if parallel.sequence:
        lengths = slice_lengths(config) or (model.sequence_length,)
        what = "model.sequence_length" if len(lengths) == 1 else "parallel.slices: the length"
        why = f"parallel.tensor={degree} with parallel.sequence=true"
        if parallel.context > 1:
            why = f"{why} and parallel.context={parallel.context}"
        for length in lengths:
            _check_multiple(what, length, degree * parallel.context, why)


def _check_grid(config: TrainConfig, shape: GridShape) -> None:
    model, why = config.model, f"parallel.tensor_layout={config.parallel.tensor_layout}"
    sizes = config.gpt(vocabulary_size=1)
    _check_multiple("model.width", model.width, shape.input_blocks, why)
    for name, heads in (("heads", model.heads), ("kv_heads", sizes.key_heads)):
        _check_multiple(f"model.{name}", heads, shape.side, why)
    parts = config.data_degree * config.num_microbatches * shape.batch_blocks
    if config.batch.size % parts:
        above = -(-config.batch.size // parts) * parts
        raise InputError(
            f"batch.size={config.batch.size}: {why} cuts each micro-batch into {shape.batch_blocks} parts, so "
            f"batch.size must be a multiple of {parts}. Use {above}, or lower batch.microbatches."
        )


def _check_context(config: TrainConfig, schedule: Schedule) -> None:
    parallel, model = config.parallel, config.model
    degree, kind = parallel.context, parallel.context_kind
    if config.parallel.slices is not None or schedule.num_slices > 1:
        raise InputError(
            f"parallel.context={degree}: does not work with sequence slices, which cut the sequence too. Remove "
            "parallel.slices, or use a schedule without slices."
        )
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"parallel.context={degree}: does not work with asynchronous schedule {schedule.name!r}. Use a synchronous "
            "one such as 1f1b."
        )
    if model.dropout > 0:
        raise InputError(
            f"model.dropout={model.dropout}: does not work with parallel.context={degree}, which does not support "
            "dropout of attention weights. Set it to 0."
        )
    why = f"parallel.context={degree} with parallel.context_kind={kind}"
    _check_multiple("model.sequence_length", model.sequence_length, 2 * degree if kind == "ring" else degree, why)
    if kind == "ulysses":
        tensor = parallel.tensor if parallel.tensor_layout == "1d" else 1
        heads, keys = model.heads // tensor, max(1, (model.kv_heads or model.heads) // tensor)
        if heads % degree or (keys % degree and degree % keys):
            fits = [n for n in divisors(heads) if keys % n == 0 or n % keys == 0]
            raise InputError(
                f"parallel.context={degree}: context_kind ulysses divides {heads} query heads and {keys} key heads "
                f"between the processes. Use {either(fits)}, or ring."
            )


def tokens_multiple(config: TrainConfig) -> int:
    """What the length of a sequence must be a multiple of; the whole length where slices are shared too."""
    parallel = config.parallel
    if parallel.sequence and parallel.slices is not None:
        return config.model.sequence_length
    chunks = 2 if parallel.context > 1 and parallel.context_kind == "ring" else 1
    return math.lcm(chunks * parallel.context, parallel.context * (parallel.tensor if parallel.sequence else 1))


def samples_multiple(config: TrainConfig) -> int:
    """What the number of samples of a micro-batch must be a multiple of."""
    parallel = config.parallel
    if parallel.tensor_layout == "1d":
        return 1
    return GridShape.of(parallel.tensor, parallel.tensor_layout, parallel.tensor_depth).batch_blocks


def _check_multiple(name: str, value: int, by: int, why: str) -> None:
    """Raises InputError where the value of an option is not a multiple of `by`."""
    if value % by:
        below, above = value // by * by, -(-value // by) * by
        raise InputError(
            f"{name}={value}: must be a multiple of {by} with {why}. Use {f'{below} or {above}' if below else above}."
        )
