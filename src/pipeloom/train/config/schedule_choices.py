"""What ``--schedule auto`` chooses from: the schedules that a run can have with its other options. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipeloom.errors import PipeloomError
from pipeloom.plan.search.space.shapes import MOST_CHUNKS, ON_REQUEST
from pipeloom.schedules import SYNCHRONOUS, find
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import usual_schedule
from pipeloom.train.config.train_config import TrainConfig


def schedule_choices(config: TrainConfig) -> Iterator[TrainConfig]:
    """`config` with each schedule and number of virtual stages that it can run, the usual schedule first.

    With one rank, all schedules are the same.

    Raises:
        InputError: there is none; why the usual schedule does not run.
    """
    usual = usual_schedule(config)
    others = [] if config.num_ranks == 1 else [name for name in SYNCHRONOUS if name not in (usual, *ON_REQUEST)]
    refusal: PipeloomError | None = None
    some = False
    for name in (usual, *others):
        for chunks in _chunks_of(name, config):
            found = replace(config.changed("parallel", chunks=chunks), schedule=name)
            try:
                validate_settings(found)
            except PipeloomError as error:
                refusal = refusal or error
            else:
                some = True
                yield found
    if refusal is not None and not some:
        raise refusal


def _chunks_of(name: str, config: TrainConfig) -> Iterable[int]:
    """The numbers of virtual stages that a schedule may have in a run."""
    number, asked = find(name).chunks, config.parallel.chunks
    if number is not None:
        return [number] if asked in (None, number) else []
    if asked is not None:
        return [asked]
    most = (config.blocks or 1) // config.parallel.pipeline
    return range(1, min(most, MOST_CHUNKS) + 1)
