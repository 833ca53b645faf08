"""``--parallel.slices auto``: lengths of the sequence slices, found by measuring a block of the model."""

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.common.quantities import seconds_text
from pipeloom.models import GPTConfig
from pipeloom.plan.slicing import LinearTime, slice_for_schedule
from pipeloom.plan.slicing.measure_slices import measure_slices
from pipeloom.train.checkpoint import load
from pipeloom.train.config.schedule import schedule_name
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.process_group import Group

_FINEST = 64  # slices that are measured begin at multiples of a 64th of the sequence


def choose_slices(config: TrainConfig, group: Group, checkpoint: Path | None) -> tuple[TrainConfig, str]:
    """Replace ``auto`` by lengths, the same on every process; and a line about them.

    A resumed run keeps the lengths of its checkpoint. Else process 0 measures one block of the model for some seconds
    while the others wait.
    """
    answer: tuple[int | str, str] | None = None
    if group.rank == 0:
        key = CheckpointKey.read(config.checkpoint_key_file)
        saved = load(checkpoint, key=key).state.get("config", {}).get("parallel", {}) if checkpoint else {}
        kept = saved.get("slices")
        if kept is not None and saved.get("pipeline") == config.parallel.pipeline:
            answer = kept, f"slices {kept}, as in {checkpoint}"
        else:
            answer = _measured(config)
    slices, note = group.gather_json(answer)[0]
    return config.changed("parallel", slices=slices), note


def _measured(config: TrainConfig) -> tuple[int | str, str]:
    start = perf_counter()
    model, ranks, tokens = config.model, config.parallel.pipeline, config.model.sequence_length
    sizes: dict[str, Any] = {
        name: getattr(model, name) for name in ("width", "heads", "kv_heads", "positions", "dropout")
    }
    if model.experts:
        of_experts = ("experts", "router", "top_k", "capacity_factor", "capacity_by", "shared_experts", "expert_width")
        sizes |= {name: getattr(model, name) for name in of_experts}
        sizes["experts_every"] = min(model.experts_every, ranks)
    grid = -(-tokens // _FINEST)
    # One block for each rank is enough: blocks are alike, and a rank's share takes as often as long as it has blocks.
    one_each = GPTConfig(vocabulary_size=256, layers=ranks, sequence_length=tokens, **sizes)
    measured = measure_slices(one_each, num_ranks=ranks, grid=grid, piece=config.microbatch_size)
    costs = measured.costs  # of several blocks; message costs do not change
    blocks = -(-model.layers // ranks)
    costs = replace(costs, forward=_times(costs.forward, blocks), backward=_times(costs.backward, blocks))
    found, whole = (
        slice_for_schedule(
            costs,
            schedule=schedule_name(config),
            sequence=tokens,
            num_ranks=ranks,
            batch=config.num_microbatches,
            grid=grid,
            max_piece=1,
            sliced=sliced,
        )
        for sliced in (True, False)
    )
    lengths = found.slices[0]
    text = ",".join(map(str, lengths))
    seconds = f"{seconds_text(found.predicted_seconds)} per step, {seconds_text(whole.predicted_seconds)} without"
    took = seconds_text(perf_counter() - start)
    return text if len(lengths) > 1 else 1, f"slices {text}: predicted {seconds} (measured in {took})"


def _times(one: LinearTime, blocks: int) -> LinearTime:
    a0, a1, a2, a3 = one.context
    base = tuple((tokens, seconds * blocks) for tokens, seconds in one.base)
    return replace(one, base=base, context=(a0 * blocks, a1 * blocks, a2 * blocks, a3 * blocks))
