"""The schedule, the stages and the sequence slices of a run, from its configuration. No torch."""

from __future__ import annotations

import math
from functools import partial

from pipeloom import schedules
from pipeloom.errors import InputError, ScheduleError
from pipeloom.ir import Schedule, check
from pipeloom.passes import check_has_backwards
from pipeloom.schedules import FAMILIES, steady_length
from pipeloom.split.layer_chain import even_parts
from pipeloom.train.config.train_config import TrainConfig

AUTO = "auto"
CUTS = ("layers", "parameters", "time")
_MOST_STEPS = 10_000  # between drains


def make_schedule(config: TrainConfig) -> Schedule:
    """The schedule of every step, checked.

    Raises:
        InputError: options that do not fit each other.
    """
    check_slices(config)
    lengths, name = slice_lengths(config), schedule_name(config)
    streams = is_stream(name)
    if streams:
        check_replicas(config)
    elif config.parallel.replicas is not None:
        raise InputError(
            f"parallel.replicas={config.parallel.replicas}: schedule {name!r} has one rank per stage. Remove it, or "
            "use --schedule pipedream."
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
        build("pipedream")  # validates everything but the number of versions
        raise InputError(f"{error} Set it as `--batch.microbatches`, and `--batch.size` at least as large.") from error
    check(schedule)
    check_has_backwards(schedule)
    _check_fits(config, schedule, lengths, streams)
    return schedule


def _check_fits(config: TrainConfig, schedule: Schedule, lengths: tuple[int, ...] | None, streams: bool) -> None:
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
    if schedule.num_stages > config.model.layers:
        raise InputError(
            f"model.layers={config.model.layers}: schedule {name!r} has {schedule.num_stages} stages, and each needs a "
            "block. Raise model.layers, or lower parallel.pipeline or parallel.chunks."
        )


def parse_cut(config: TrainConfig, num_stages: int) -> str | list[int]:
    """``parallel.cut`` as `pipeloom.split.split` takes it: a word, or the blocks per stage."""
    cut, layers = config.parallel.cut, config.model.layers
    if cut in CUTS:
        return cut
    counts = [int(part) for part in cut.split(",") if part.strip().isdecimal()]
    if len(counts) != cut.count(",") + 1:
        raise InputError(f"parallel.cut={cut}: must be {', '.join(CUTS)}, or blocks per stage such as 5,3.")
    if len(counts) != num_stages or sum(counts) != layers:
        raise InputError(
            f"parallel.cut={cut}: has {len(counts)} stages with {sum(counts)} blocks; the run has {num_stages} stages "
            f"and {layers} blocks."
        )
    if not all(counts):
        raise InputError(
            f"parallel.cut={cut}: stage {counts.index(0)} has no block. Give it one, or lower parallel.pipeline or "
            "parallel.chunks."
        )
    return counts


# Slices


def schedule_name(config: TrainConfig) -> str:
    """The name of the schedule, with ``auto`` resolved."""
    if config.schedule != AUTO:
        return config.schedule
    return "1f1b" if config.parallel.slices is None else "seq1f1b"


def slice_lengths(config: TrainConfig) -> tuple[int, ...] | None:
    """Tokens of every slice; None where sequences are not sliced or the lengths are still to be measured.

    Raises:
        InputError: ``parallel.slices`` is malformed, or does not fit the sequence length.
    """
    asked, tokens = config.parallel.slices, config.model.sequence_length
    if asked is None or asked == AUTO:
        return None
    parts = str(asked).split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(f"parallel.slices={asked}: must be auto, a number, or lengths such as 48,40,40.")
    lengths = tuple(map(int, parts))
    if len(lengths) == 1:
        [count] = lengths
        if count > tokens:
            raise InputError(f"parallel.slices={count}: must be at most model.sequence_length={tokens}.")
        return tuple(even_parts(tokens, count))
    if sum(lengths) != tokens:
        raise InputError(f"parallel.slices={asked}: must add up to model.sequence_length={tokens}, not {sum(lengths)}.")
    return lengths


def check_slices(config: TrainConfig) -> None:
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
        raise ScheduleError(
            f"parallel.slices=auto: schedule {name!r} does not take every number of slices. Give a number, or use "
            "seq1f1b or terapipe."
        )


# Asynchronous schedules (streams)


def is_stream(name: str) -> bool:
    """Whether the named schedule is asynchronous: it updates parameters while it runs. Files never are."""
    family = FAMILIES.get(name)
    return family is not None and bool(family.stream)


def stream_length(config: TrainConfig) -> int:
    """Micro-batches of a stream that is long enough to show its steady state, from which any length follows."""
    each, in_flight = config.num_microbatches, config.parallel.in_flight
    return steady_length(config.replicas, microbatches_per_update=each, in_flight=in_flight)


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
