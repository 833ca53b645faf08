"""The layout of an elastic run on the processes that there are. No torch.

    pipeline x data, 8 blocks, 16 micro-batches in all       processes     layout
    4 x 2                                                    7             4 x 1   4 ranks, 2 blocks per stage
    4 x 1                                                    3             3 x 1   3 + 3 + 2 blocks
    1 x 2                                                    1             1 x 1   16 micro-batches in place of 8

Axes inside a stage (tensor, context, expert) keep their degrees as long as one stage fits on the processes. The global
batch and the number of its micro-batches stay, so that no sample is repeated or skipped.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipeloom.common.quantities import counted
from pipeloom.errors import InputError, PipeloomError
from pipeloom.train.config.memory import under_cap
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.schedule import parse_cut, schedule_name, unused_data_options
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.opening import run_tokenizer

_INSIDE = ("tensor", "tensor_layout", "tensor_depth", "sequence", "context", "context_kind")
_EXPERTS = ("expert", "expert_axes", "expert_exchange")
_RECOMPUTES = ("none", "selective", "full")  # each takes less memory than the one before


class Layout(NamedTuple):
    """A configuration that fits the processes.

    Attributes:
        config: with its degrees, its micro-batches per replica and its schedule.
        notes: options that had to change, beside the degrees.
    """

    config: TrainConfig
    notes: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The layout in a sentence."""
        parallel = self.config.parallel
        replicas = f"data={parallel.data}" if parallel.replicas is None else f"replicas={parallel.replicas}"
        found = (
            f"{counted(self.config.num_processes, 'rank')}: parallel.pipeline={parallel.pipeline}",
            f"parallel.{replicas}",
            f"batch.microbatches={self.config.num_microbatches}",
        )
        return ", ".join((*found, *self.notes))


def fit(config: TrainConfig, count: int, *, exact: bool) -> Layout:
    """The layout for `count` processes: that of `config` if it has as many.

    Of the pipeline- and data-parallel degrees that are possible, it takes those with the shortest estimated step,

        (micro-batches per replica + stages - 1) x blocks of the largest stage x samples per micro-batch,

    the closed form of GPipe and 1F1B for blocks that take equally long. Stages are not larger than `config` has them,
    or, with fewer processes than its pipeline-parallel degree, than they must be: a rank's memory might not suffice.
    With ``memory.cap``, every layout under the cap is possible.

    Args:
        config: as given.
        count: processes that there are.
        exact: whether all of them must have a part; else some may be left over.

    Raises:
        InputError: there is no layout, or there are fewer than ``min_ranks``.
    """
    if count < config.min_ranks:
        raise InputError(f"{count} processes: fewer than min_ranks={config.min_ranks}. Start more, or lower min_ranks.")
    if config.num_processes == count and config.parallel.data != -1:
        return Layout(config)
    reason = ""
    for degrees in _degrees(config, count, exact=exact):
        for found in _variants(config, *degrees):
            try:
                check_layout(found.config)
            except PipeloomError as error:
                reason = reason or f" {error}"
            else:
                return found
    raise InputError(f"{count} processes: the run has no layout for them.{reason}")


def fit_torchrun(config: TrainConfig, world_size: int) -> Layout:
    """The layout for the processes that torchrun started, from the newest checkpoint of the run.

    Raises:
        InputError: as `fit`; or there are more processes than ``max_ranks``.
    """
    if config.max_ranks is not None and world_size > config.max_ranks:
        raise InputError(
            f"{world_size} processes: more than max_ranks={config.max_ranks}. Start torchrun with fewer, or raise "
            "max_ranks."
        )
    if config.resume_from_checkpoint is None:
        config = replace(config, resume_from_checkpoint="auto")
    return fit(config, world_size, exact=True)


class _Degrees(NamedTuple):
    pipeline: int
    data: int
    inside: bool  # whether axes inside a stage keep their degrees


def _degrees(config: TrainConfig, count: int, *, exact: bool) -> Iterator[_Degrees]:
    """The degrees that may be possible, best first."""
    inside = config.stage_processes <= count
    places = count // config.stage_processes if inside else count
    if exact and inside and count % config.stage_processes:
        return
    least = min(config.parallel.pipeline, places)
    found = [
        _Degrees(pipeline, data, inside)
        for pipeline in range(1, min(places, config.blocks or places) + 1)
        for data in range(1, min(places // pipeline, config.batch.size) + 1)
        if not exact or pipeline * data == places
    ]

    def order(each: _Degrees) -> tuple[bool, float, float]:
        larger = each.pipeline < least and config.memory.cap is None
        return larger, _relative_seconds(config, each), abs(math.log(each.pipeline / config.parallel.pipeline))

    yield from sorted(found, key=order)


def _microbatches(config: TrainConfig, data: int) -> int:
    """Micro-batches per replica, so that there are as many in all as before; one has at least a sample."""
    total = config.num_microbatches * (data if config.parallel.data == -1 else config.data_degree)
    return max(1, min(-(-total // data), config.batch.size // data))


def _relative_seconds(config: TrainConfig, degrees: _Degrees) -> float:
    """The estimated time of a step; see `fit`."""
    pipeline, data, _ = degrees
    number = _microbatches(config, data)
    blocks = 1 / pipeline if config.blocks is None else -(-config.blocks // pipeline)
    return (number + pipeline - 1) * blocks * config.batch.size / (data * number)


def _variants(config: TrainConfig, pipeline: int, data: int, inside: bool) -> Iterator[Layout]:
    """Configurations with these degrees: with the schedule of `config`, then with one that any degree can run."""
    notes: list[str] = []
    usual = ParallelConfig()
    parallel: dict[str, Any] = {"pipeline": pipeline, "data": data, "replicas": None}
    if not inside:
        names = [name for name in ("tensor", "context") if getattr(config.parallel, name) > 1]
        notes += [f"parallel.{name}=1 in place of {getattr(config.parallel, name)}" for name in names]
        parallel |= {name: getattr(usual, name) for name in _INSIDE}
    members = data * (config.parallel.context if inside else 1)
    if config.parallel.expert > 1 and members % config.parallel.expert:
        notes.append(f"parallel.expert=1 in place of {config.parallel.expert}")
        parallel |= {name: getattr(usual, name) for name in _EXPERTS}
    found = config.changed("parallel", **parallel).changed("batch", microbatches=_microbatches(config, data))
    found = found.changed("parallel", **{name: getattr(usual, name) for name in unused_data_options(found)})
    found = replace(found, reroute=found.reroute and found.has_peers)
    found, more = with_stages(found, len(config.parallel.cut.split(",")))
    notes += more
    yield Layout(found, tuple(notes))
    other = "1f1b" if config.parallel.slices is None else "seq1f1b"
    if schedule_name(config) != other or config.parallel.chunks is not None:
        substitute = replace(found.changed("parallel", chunks=None), schedule=other)
        yield Layout(substitute, (*notes, f"schedule={other} in place of {schedule_name(config)}"))


def with_stages(config: TrainConfig, cuts: int) -> tuple[TrainConfig, list[str]]:
    """Without what is given for each of another number of stages; and the changes in words.

    Args:
        config: with the new number of stages.
        cuts: how many numbers ``parallel.cut`` has.
    """
    notes = []
    if cuts > 1:
        try:
            parse_cut(config, config.parallel.pipeline * (config.parallel.chunks or 1))
        except InputError:
            notes.append(f"parallel.cut=layers in place of {config.parallel.cut}")
            config = config.changed("parallel", cut="layers")
    kinds = config.memory.recompute.split(",")
    if len(kinds) > 1 and len(kinds) != config.parallel.pipeline:
        most = max(kinds, key=lambda kind: _RECOMPUTES.index(kind) if kind in _RECOMPUTES else 0)
        notes.append(f"memory.recompute={most} in place of {config.memory.recompute}")
        config = config.changed("memory", recompute=most)
    return config, notes


def check_layout(config: TrainConfig) -> None:
    """Raises PipeloomError where a run cannot have this layout."""
    validate_settings(config)
    if config.memory.cap is not None:
        under_cap(config, run_tokenizer(config).vocabulary_size, device="cuda")
