"""The schedule, the stages, the sequence slices and the data-parallel replicas of a run. No torch."""

import math
from functools import partial

from pipeloom import schedules
from pipeloom.common.division import even_parts
from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, PipeloomError, ScheduleError
from pipeloom.ir import DataStrategy, Schedule, check
from pipeloom.passes import check_has_backwards
from pipeloom.schedules import FAMILIES, Family, steady_length
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import AUTO, TrainConfig, whole_numbers

CUTS = ("layers", "parameters", "time")
_MOST_STEPS = 10_000  # between drains


def make_schedule(config: TrainConfig) -> Schedule:
    """The schedule of every step, checked.

    Raises:
        InputError: options that do not fit each other.
    """
    _check_slices(config)
    lengths, name = slice_lengths(config), schedule_name(config)
    streams, length, in_flight = is_stream(name), config.num_microbatches, config.parallel.in_flight
    if streams:
        check_replicas(config)  # any length follows from one that shows the steady state
        length = steady_length(config.replicas, microbatches_per_update=length, in_flight=in_flight)
    elif config.parallel.replicas is not None and not replicates(name):
        raise InputError(
            f"parallel.replicas={config.parallel.replicas}: schedule {name!r} has one rank per stage. Remove it, or "
            "use --schedule 1f1b or pipedream."
        )
    build = partial(
        schedules.build,
        num_ranks=config.num_ranks,
        num_microbatches=length,
        num_chunks=config.parallel.chunks,
        num_slices=len(lengths or (0,)),
        weights=config.weights,
        replicas=None if config.parallel.replicas is None else config.replicas,
        microbatches_per_update=config.num_microbatches if streams else None,
        in_flight=in_flight if streams else None,
    )
    try:
        schedule = build(name)
    except ScheduleError as error:
        if name != "pipedream-2bw" or config.weights is not None:
            raise
        build("pipedream")  # validates everything but the number of versions
        raise InputError(f"{error} Set it as `--batch.microbatches`, and `--batch.size` at least as large.") from error
    check(schedule)
    check_has_backwards(schedule)
    name = schedule.name
    if schedule.microbatches_per_update is not None and not streams:
        names = ", ".join(family.name for family in FAMILIES.values() if family.stream)
        raise InputError(
            f"schedule={config.schedule}: updates the parameters while it runs, which `pipeloom train` supports only "
            f"for {names}. Use one of them, or pipeloom.Stream."
        )
    if lengths is not None and len(lengths) != schedule.num_slices:
        raise InputError(
            f"parallel.slices={config.parallel.slices}: schedule {name!r} has {schedule.num_slices} slices. Remove "
            f"parallel.slices, or use {schedule.num_slices}."
        )
    blocks = config.blocks
    if blocks is not None and schedule.num_stages > blocks:
        if config.model.pretrained is not None:
            raise InputError(
                f"model.pretrained={config.model.pretrained}: has {counted(blocks, 'block')}, schedule {name!r} has "
                f"{schedule.num_stages} stages, and each needs a block. Lower parallel.pipeline or parallel.chunks."
            )
        raise InputError(
            f"model.layers={config.model.layers}: schedule {name!r} has {schedule.num_stages} stages, and each needs a "
            f"block. Use --model.layers {schedule.num_stages} or more{_fewer_stages(config, schedule.num_stages)}."
        )
    return schedule


def _fewer_stages(config: TrainConfig, num_stages: int) -> str:
    """The end of a fix: the options that lower the number of stages; empty if the schedule is a file."""
    family = FAMILIES.get(schedule_name(config))
    if family is None:
        return ""
    fewer = range(1, num_stages // config.parallel.pipeline) if family.chunks is None else ()
    chunks = any(_supports(family, config, number) for number in fewer)
    return f", or lower parallel.pipeline{' or parallel.chunks' if chunks else ''}"


def _supports(family: Family, config: TrainConfig, chunks: int) -> bool:
    try:
        family(num_ranks=config.parallel.pipeline, num_microbatches=config.num_microbatches, num_chunks=chunks)
    except PipeloomError:
        return False
    return True


def parse_cut(config: TrainConfig, num_stages: int) -> str | list[int]:
    """``parallel.cut`` as `pipeloom.split.split` takes it: a word, or the blocks per stage."""
    cut, layers = config.parallel.cut, config.blocks
    if cut in CUTS:
        return cut
    counts = [int(part) for part in cut.split(",") if part.strip().isdecimal()]
    if len(counts) != cut.count(",") + 1:
        raise InputError(f"parallel.cut={cut}: must be {', '.join(CUTS)}, or blocks per stage such as 5,3.")
    if len(counts) != num_stages or layers not in (None, sum(counts)):
        layers = sum(counts) if layers is None else layers
        raise InputError(
            f"parallel.cut={cut}: has {len(counts)} stages with {sum(counts)} blocks; the run has {num_stages} stages "
            f"and {layers} blocks. Give {counted(num_stages, 'number')} with the sum {layers}."
        )
    if not all(counts):
        raise InputError(
            f"parallel.cut={cut}: stage {counts.index(0)} has no block. Give it one{_fewer_stages(config, num_stages)}."
        )
    return counts


# Slices


def schedule_name(config: TrainConfig) -> str:
    """The name of the schedule, or the usual one.

    Raises:
        InputError: the run has not chosen it yet.
    """
    if config.schedule == AUTO:
        raise InputError(
            "schedule=auto: `pipeloom train` measures and chooses the schedule when it starts. Name a schedule, such "
            f"as {usual_schedule(config)}."
        )
    return config.schedule or usual_schedule(config)


def usual_schedule(config: TrainConfig) -> str:
    """The schedule of a run that names none."""
    return "1f1b" if config.parallel.slices is None else "seq1f1b"


def slice_lengths(config: TrainConfig) -> tuple[int, ...] | None:
    """Tokens of every slice; None where sequences are not sliced or the lengths are still to be measured.

    Raises:
        InputError: ``parallel.slices`` is malformed, or does not fit the sequence length.
    """
    asked, tokens = config.parallel.slices, config.model.sequence_length
    if asked is None or asked == AUTO:
        return None
    lengths = whole_numbers(str(asked))
    if not all(lengths):
        raise InputError(f"parallel.slices={asked}: must be auto, a number, or lengths such as 48,40,40.")
    if len(lengths) == 1:
        [count] = lengths
        if count > tokens:
            raise InputError(f"parallel.slices={count}: must be at most model.sequence_length={tokens}.")
        return tuple(even_parts(tokens, count))
    if sum(lengths) != tokens:
        raise InputError(f"parallel.slices={asked}: must add up to model.sequence_length={tokens}, not {sum(lengths)}.")
    return lengths


def _check_slices(config: TrainConfig) -> None:
    """Validate that the schedule supports slices.

    Raises:
        InputError: see `slice_lengths`; or `auto` for a schedule with a fixed number of slices.
    """
    lengths, name, asked = slice_lengths(config), schedule_name(config), config.parallel.slices
    family = FAMILIES.get(name)
    wants = asked == AUTO or (lengths is not None and len(lengths) > 1)
    if wants and family is not None and not family.sliced:
        sliced = ", ".join(each.name for each in FAMILIES.values() if each.sliced)
        raise ScheduleError(
            f"parallel.slices={asked}: schedule {name!r} runs whole sequences. Remove parallel.slices, or use {sliced}."
        )
    if asked == AUTO and (family is None or family.chunks is None):
        rule = "supports only some numbers of slices" if family is not None else "has a fixed number of slices"
        number = "a divisor of parallel.pipeline" if family is not None else "the number of the file"
        raise ScheduleError(
            f"parallel.slices=auto: schedule {name!r} {rule}, and auto needs any. Set parallel.slices to {number}, or "
            "use seq1f1b or terapipe."
        )


# Asynchronous schedules (streams)


def is_stream(name: str) -> bool:
    """Whether the named schedule is asynchronous: it updates parameters while it runs. Files never are."""
    family = FAMILIES.get(name)
    return family is not None and bool(family.stream)


def replicates(name: str) -> bool:
    """Whether the named schedule is synchronous and has stages on several ranks. Files never have."""
    family = FAMILIES.get(name)
    return family is not None and family.replicated


def stages_of_ranks(config: TrainConfig) -> list[int]:
    """For each pipeline rank, the first of its stages."""
    return [stage for stage, count in enumerate(config.replicas) for _ in range(count)]


def check_replicas(config: TrainConfig) -> None:
    """Validate that a stream with these replicas per stage drains often enough, before its schedule is made.

    Raises:
        InputError: their least common multiple is too large.
    """
    each = math.lcm(*config.replicas)
    if each > _MOST_STEPS:
        raise InputError(
            f"parallel.replicas={config.parallel.replicas}: the least common multiple is {each}, and at most "
            f"{_MOST_STEPS} steps may pass between drains. Use fewer replicas, or numbers that divide each other."
        )


# Data parallelism


def resolve_data_degree(config: TrainConfig, world_size: int | None) -> TrainConfig:
    """`config` with a number in place of ``parallel.data`` -1.

    Args:
        config: as given.
        world_size: processes of the process group; None outside of one.

    Raises:
        InputError: there is no process group, or its size is not a multiple of the pipeline-parallel degree.
    """
    if config.parallel.data != -1:
        return config
    if world_size is None:
        raise InputError("parallel.data=-1: needs a running process group. Outside torchrun, give a number.")
    config = config.changed("parallel", data=config.mesh_shape(world_size).degree("dp"))
    default = ParallelConfig()  # options for more replicas than there are
    return config.changed("parallel", **{name: getattr(default, name) for name in unused_data_options(config)})


def unused_data_options(config: TrainConfig) -> list[str]:
    """The options of ``parallel`` that have no effect with the data-parallel degree of `config`.

    With one replica and parameters in memory, nothing is sharded or communicated. Offloaded parameters of zero3 are
    gathered and freed in buckets, and so are float32 masters of 16-bit formats, also with one replica.
    """
    if config.parallel.data != 1 or config.parallel.context != 1:
        return []
    offloads = config.memory.offload_parameters
    gathers = offloads and DataStrategy(config.parallel.data_strategy).shards_parameters
    unused = [] if gathers else ["data_strategy", "data_granularity"]
    return [*unused, *([] if offloads else ["data_bucket_bytes"]), *(["order"] if config.parallel.tensor == 1 else [])]


def process_names(config: TrainConfig) -> list[str]:
    """The name of each process in messages."""
    if config.parallel.auto:  # their places follow from the plan
        return [f"process {rank}" for rank in range(config.num_processes)]
    shape = config.mesh_shape()
    names = []
    for place in map(shape.coordinates, range(shape.num_processes)):
        inside = ", ".join(f"{axis} {place[axis]}" for axis in ("cp", "tp") if shape.degree(axis) > 1)
        replica = f" of replica {place['dp']}" if config.data_degree > 1 else ""
        names.append(f"rank {place['pp']}{f' ({inside})' if inside else ''}{replica}")
    return names


def samples_of_replica(count: int, replica: int, degree: int) -> range:
    """Which of the `count` samples of a batch a replica takes: contiguous, sizes differ by at most one.

    The samples of all replicas together do not depend on their number.
    """
    parts = even_parts(count, degree)
    start = sum(parts[:replica])
    return range(start, start + parts[replica])
