"""``parallel.slices``: from what was asked for to the lengths of the slices."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipeloom.common.quantities import seconds_text
from pipeloom.errors import InputError, ScheduleError
from pipeloom.schedules import FAMILIES
from pipeloom.split.layer_chain import even_parts
from pipeloom.train.config.train_config import TrainConfig

if TYPE_CHECKING:
    from pipeloom.plan.slicing import LinearTime, SliceCosts
    from pipeloom.train.checkpoint.exchange import Exchange

AUTO = "auto"
_FINEST = 64  # slices that are measured begin at multiples of a 64th of the sequence


def schedule_name(config: TrainConfig) -> str:
    """The schedule that ``auto`` stands for, else the one that was named."""
    if config.schedule != AUTO:
        return config.schedule
    return "1f1b" if config.parallel.slices is None else "seq1f1b"


def slice_lengths(config: TrainConfig) -> tuple[int, ...] | None:
    """Tokens of every slice; None where sequences stay whole or the lengths are still to be measured.

    Raises:
        InputError: no number and no list of lengths, more slices than tokens, or lengths of another sum.
    """
    asked, tokens = config.parallel.slices, config.model.sequence_length
    if asked is None or asked == AUTO:
        return None
    parts = str(asked).split(",")
    if not all(part.strip().isdecimal() and int(part) for part in parts):
        raise InputError(
            f"parallel.slices is {asked!r}: it is auto, a number, or lengths of slices such as 48,40,40; choose one"
        )
    lengths = tuple(map(int, parts))
    if len(lengths) == 1:
        [count] = lengths
        if count > tokens:
            raise InputError(
                f"parallel.slices is {count} for model.sequence_length {tokens}: each slice has at least one token; "
                "lower it"
            )
        return tuple(even_parts(tokens, count))
    if sum(lengths) != tokens:
        raise InputError(
            f"parallel.slices is {asked}: {sum(lengths)} tokens for model.sequence_length {tokens}; make both agree"
        )
    return lengths


def check_slices(config: TrainConfig) -> None:
    """Refuse slices of a schedule that has none.

    Raises:
        InputError: what `slice_lengths` refuses, or `auto` for a schedule without slices or with few numbers of them.
    """
    lengths, name = slice_lengths(config), schedule_name(config)
    family = FAMILIES.get(name)
    wants = config.parallel.slices == AUTO or (lengths is not None and len(lengths) > 1)
    if wants and family is not None and not family.sliced:
        sliced = ", ".join(each.name for each in FAMILIES.values() if each.sliced)
        raise ScheduleError(
            f"parallel.slices is {config.parallel.slices} with schedule {name!r}, which does not cut sequences: leave "
            f"slices out, or use {sliced}"
        )
    if config.parallel.slices == AUTO and (family is None or family.chunks is None):
        raise ScheduleError(
            f"parallel.slices is auto with schedule {name!r}, which has not every number of slices: give a number, "
            "or use seq1f1b or terapipe"
        )


def choose_slices(config: TrainConfig, exchange: Exchange, checkpoint: Path | None) -> tuple[TrainConfig, str | None]:
    """Put lengths in the place of ``auto``, the same on every process; and a line about them.

    A run that goes on keeps the lengths of its checkpoint. Else process 0 measures one block of the model while the
    others wait: seconds, of no more memory than the block takes.
    """
    if config.parallel.slices != AUTO:
        return config, None
    payload = json.dumps(_kept_or_measured(config, checkpoint) if exchange.rank == 0 else None).encode()
    slices, note = json.loads(exchange.all_gather(payload)[0])
    return replace(config, parallel=replace(config.parallel, slices=slices)), note


def _kept_or_measured(config: TrainConfig, checkpoint: Path | None) -> tuple[int | str, str]:
    if checkpoint is not None:
        from pipeloom.train.checkpoint import load

        saved = load(checkpoint).state.get("config", {}).get("parallel", {})
        kept = saved.get("slices")
        if kept is not None and saved.get("pipeline") == config.parallel.pipeline:
            return kept, f"slices {kept}: those of {checkpoint}"
    return _measured(config)


def _measured(config: TrainConfig) -> tuple[int | str, str]:
    from pipeloom.models import GPTConfig
    from pipeloom.plan.slicing import slice_for_schedule
    from pipeloom.plan.slicing.measure_slices import measure_slices

    start = perf_counter()
    model, ranks, tokens = config.model, config.parallel.pipeline, config.model.sequence_length
    microbatches = config.num_microbatches
    sizes: dict[str, Any] = {name: getattr(model, name) for name in ("width", "heads", "positions", "dropout")}
    grid = -(-tokens // _FINEST)
    # One block for each rank is enough: blocks are alike, and a rank's share takes as often as long as it has blocks.
    one_each = GPTConfig(vocabulary_size=256, layers=ranks, sequence_length=tokens, **sizes)
    piece = config.samples_a_microbatch  # which stays as it is
    measured = measure_slices(one_each, num_ranks=ranks, grid=grid, piece=piece)
    costs = _times(measured.costs, -(-model.layers // ranks))
    found, whole = (
        slice_for_schedule(
            costs,
            schedule=schedule_name(config),
            sequence=tokens,
            num_ranks=ranks,
            batch=microbatches,
            grid=grid,
            max_piece=1,
            sliced=sliced,
        )
        for sliced in (True, False)
    )
    lengths = found.slices[0]
    text = ",".join(map(str, lengths))
    seconds = f"{seconds_text(found.predicted_seconds)} a step, {seconds_text(whole.predicted_seconds)} without"
    took = seconds_text(perf_counter() - start)
    return text if len(lengths) > 1 else 1, f"slices {text}, by what a block takes here: {seconds} (found in {took})"


def _times(costs: SliceCosts, blocks: int) -> SliceCosts:
    """Costs of so many blocks; messages stay as they are."""

    def times(one: LinearTime) -> LinearTime:
        a0, a1, a2, a3 = one.context
        base = tuple((tokens, seconds * blocks) for tokens, seconds in one.base)
        return replace(one, base=base, context=(a0 * blocks, a1 * blocks, a2 * blocks, a3 * blocks))

    return replace(costs, forward=times(costs.forward), backward=times(costs.backward))
