"""What stands in an output directory so that its run can be repeated."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from pipeloom.schedules import user_defined as own_schedule
from pipeloom.train.config.train_config import OWN_CHECKPOINT, TrainConfig


def repeatable(config: TrainConfig) -> TrainConfig:
    """`config` so that it means the same from any directory and starts the run from its beginning.

    Paths become absolute. A run that was resumed from a checkpoint of its own output directory is one run: repeating
    it starts at step 0. A checkpoint of another run stays what it starts from.
    """

    def absolute(path: str | None) -> str | None:
        return path and str(Path(path).absolute())

    resume = config.resume_from_checkpoint
    if resume is not None:
        own = resume in OWN_CHECKPOINT or Path(resume).absolute().parent == Path(config.output_dir).absolute()
        resume = None if own else absolute(resume)
    memory, kind = config.memory, "disk:"
    if memory.offload is not None and memory.offload.startswith(kind):
        memory = dataclasses.replace(memory, offload=f"{kind}{absolute(memory.offload.removeprefix(kind))}")
    data = dataclasses.replace(config.data, path=absolute(config.data.path), tokenizer=absolute(config.data.tokenizer))
    return dataclasses.replace(
        config,
        data=data,
        memory=memory,
        plan=None,  # all that it says stands in the other options; its orders are `schedule`
        schedule=own_schedule.absolute(config.schedule),
        output_dir=str(Path(config.output_dir).absolute()),
        resume_from_checkpoint=resume,
    )


def to_yaml(config: TrainConfig) -> str:
    """The text of ``config.yaml``."""
    text: str = yaml.safe_dump(config.to_mapping(), sort_keys=False, allow_unicode=True)
    return text
