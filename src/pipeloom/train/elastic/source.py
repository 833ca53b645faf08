"""The newest state from which an elastic run goes on with other ranks: copies in memory, or a checkpoint. No torch."""

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pipeloom.common.checkpoint_key import CheckpointKey
from pipeloom.errors import CheckpointError
from pipeloom.processes.elastic.copy_head import common_step, steps_of
from pipeloom.processes.elastic.generation import Generation
from pipeloom.processes.recovery.recoveries import Tether
from pipeloom.train.checkpoint.resume import find_good
from pipeloom.train.config.schedule import stages_of_ranks
from pipeloom.train.config.train_config import TrainConfig

ENTRY = "_PIPELOOM_ENTRY"  # variable: the copies in memory at which the ranks begin, as JSON


class Source(NamedTuple):
    """A state.

    Attributes:
        step: that is complete there; -1: the run has not begun.
        tethers: of the ranks whose memory has the state, each with a copy; none where it is in a checkpoint.
        checkpoint: the checkpoint; None without one.
    """

    step: int = -1
    tethers: tuple[Tether, ...] = ()
    checkpoint: Path | None = None

    @property
    def words(self) -> str:
        """The source in a sentence."""
        if self.tethers:
            return f"the copies in memory of step {self.step}"
        return "the beginning" if self.checkpoint is None else str(self.checkpoint)

    def variables(self, begun: int) -> dict[str, str]:
        """What the ranks read in their environment; `begun` is the last step that had begun."""
        if not self.tethers:
            return {}
        row = {
            "copies": [tether.memories.copies for tether in self.tethers],
            "step": self.step,
            "again": max(0, begun - self.step),
            "words": self.words,
        }
        return {ENTRY: json.dumps(row)}

    def configured(self, config: TrainConfig) -> TrainConfig:
        """`config` of a run that begins there."""
        return config if self.checkpoint is None else replace(config, resume_from_checkpoint=str(self.checkpoint))


def lends(config: TrainConfig) -> bool:
    """Whether each data-parallel replica, or each rank of a stage, has the whole state of its ranks."""
    return config.has_peers and config.parallel.data_strategy == "ddp" and not config.model.experts


def newest(
    before: Source, generation: Generation, config: TrainConfig, key: CheckpointKey | None
) -> tuple[Source, list[str]]:
    """The newest complete state after a generation has ended, and lines about damaged checkpoints.

    Args:
        before: from which it began.
        generation: with the copies of its ranks.
        config: of its ranks.
        key: with which checkpoints are signed.
    """
    if not generation.first:  # its output directory was not ready: checkpoints may be of another run
        return before, []
    groups: dict[tuple[int, ...], list[int]] = {}  # what each stage of one replica needs: one of several memories
    shape, stages = config.mesh_shape(), stages_of_ranks(config)
    for rank, tether in enumerate(generation.tethers.by_rank):
        place = shape.coordinates(rank)
        if lends(config):
            place |= {"dp": 0, "pp": stages[place["pp"]]}
        groups.setdefault(tuple(place.values()), []).extend(tether.memories.copies)
    step, tethers = common_step(groups.values()), generation.tethers.by_rank
    found = Source(step, tuple(tether for tether in tethers if step in steps_of(tether.memories.copies)))
    if found.step < 0:
        found = before
    try:
        good = find_good("auto", Path(config.output_dir), leads=True, key=key)
    except CheckpointError as error:  # none is whole
        return found, [f"{error.__cause__ or error} It is passed over."]
    notices = [] if good is None else good.notices
    if good is not None and good.manifest.step > found.step:
        found = Source(good.manifest.step, (), good.path)
    return found, notices
