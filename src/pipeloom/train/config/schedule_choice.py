"""What a configuration says of schedule and cut: who computes what in which order, and where stages begin."""

from __future__ import annotations

from functools import partial

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Schedule, check
from pipeloom.passes import check_has_backwards
from pipeloom.train.config.slice_lengths import check_slices, schedule_name, slice_lengths
from pipeloom.train.config.stream_rules import check_replicas, is_stream, stream_length
from pipeloom.train.config.train_config import TrainConfig

CUTS = ("layers", "parameters", "time")


def make_schedule(config: TrainConfig) -> Schedule:
    """The schedule of every step, checked."""
    check_slices(config)
    lengths = slice_lengths(config)
    name = schedule_name(config)
    streams = is_stream(name)
    if streams:
        check_replicas(config)
    elif config.parallel.replicas is not None:
        raise InputError(
            f"parallel.replicas with schedule {name!r}, whose stages have one rank each: leave it out, or give "
            "--schedule pipedream"
        )
    build = partial(
        schedules.build,
        num_ranks=config.num_ranks,
        num_microbatches=stream_length(config) if streams else config.num_microbatches,
        num_chunks=config.parallel.chunks,
        num_slices=len(lengths or (0,)),
        weights=config.weights,
        replicas=None if config.parallel.replicas is None else config.replicas,
        microbatches_per_update=config.num_microbatches if streams else None,
        in_flight=config.parallel.in_flight if streams else None,
    )
    try:
        schedule = build(name)
    except ScheduleError as error:
        if name != "pipedream-2bw" or config.weights is not None:
            raise
        build("pipedream")  # keeps as many versions as it needs, and refuses whatever else is wrong
        raise InputError(f"{error} as --batch.microbatches, and --batch.size no smaller") from error
    check(schedule)
    check_has_backwards(schedule)
    if schedule.microbatches_per_update is not None and not streams:
        raise InputError(
            f"schedule {name!r} updates the parameters while it runs: of those `pipeloom train` runs "
            f"{', '.join(family.name for family in schedules.FAMILIES.values() if family.stream)}; take one of them, "
            "or pipeloom.Stream"
        )
    if lengths is not None and len(lengths) != schedule.num_slices:
        raise InputError(
            f"parallel.slices is {config.parallel.slices}: schedule {schedule.name!r} has {schedule.num_slices}; "
            "leave slices out, or make both agree"
        )
    if schedule.num_stages > config.model.layers:
        raise InputError(
            f"schedule {schedule.name!r} has {schedule.num_stages} stages for model.layers {config.model.layers}: each "
            "stage needs a block; raise model.layers, or lower parallel.pipeline or parallel.chunks"
        )
    return schedule


def parse_cut(config: TrainConfig, num_stages: int) -> str | list[int]:
    """``parallel.cut`` as `pipeloom.split.split` takes it: a word, or the blocks of every stage."""
    cut = config.parallel.cut
    if cut in CUTS:
        return cut
    counts = [int(part) for part in cut.split(",") if part.strip().isdecimal()]
    if len(counts) != cut.count(",") + 1:
        raise InputError(f"parallel.cut is {cut!r}: it is {', '.join(CUTS)} or blocks a stage such as 5,3; choose one")
    if len(counts) != num_stages or sum(counts) != config.model.layers:
        raise InputError(
            f"parallel.cut is {cut}: {len(counts)} stages of {sum(counts)} blocks, the run has {num_stages} stages and "
            f"{config.model.layers} blocks; make both agree"
        )
    if not all(counts):
        raise InputError(
            f"parallel.cut is {cut}: stage {counts.index(0)} has no block, and each needs one; give it one, or lower "
            "parallel.pipeline or parallel.chunks"
        )
    return counts
