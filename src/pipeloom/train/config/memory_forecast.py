"""What the ranks of a run take, from its configuration: closed forms, before anything is made. No torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, Program, Schedule
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.options import DataParallel, axis_of
from pipeloom.passes import lower
from pipeloom.plan.memory import (
    LayerMemory,
    MemoryModel,
    MemoryRow,
    RankMemory,
    gpt_layers,
    in_stages,
    memory_of_ranks,
)
from pipeloom.split.layer_chain import even_parts, find_ties, partition
from pipeloom.train.config.memory_options import activations_away, moves
from pipeloom.train.config.schedule_choice import make_schedule, parse_cut
from pipeloom.train.config.train_config import TrainConfig

if TYPE_CHECKING:
    import torch


def data_axis(config: TrainConfig) -> DataAxis | None:
    """How the copies of a run share; None where one runs alone with its own parameters."""
    return axis_of(config.shared or DataParallel(), config.number_format, config.num_copies)


def planned_program(config: TrainConfig, schedule: Schedule, *, device: str = "cuda") -> Program:
    """What every copy runs, activations that a `device` moves away included."""
    tied = config.model.tie_embeddings and schedule.num_stages > 1
    program = lower(schedule, tied_stages=((0, schedule.num_stages - 1),) if tied else (), data=data_axis(config))
    away = activations_away(config, device)
    return program if away is None else away.insert(program)


def planned_model(config: TrainConfig, vocabulary_size: int, num_stages: int, *, device: str = "cuda") -> MemoryModel:
    """The layers of every stage, and how they are trained on a `device`.

    Raises:
        InputError: the cut follows measured times, which are not known here.
    """
    precision = config.number_format
    sizes, number_bytes = config.gpt(vocabulary_size), 2 if precision.has_masters else 4
    layers = gpt_layers(sizes, config.samples_a_microbatch, number_bytes)
    return MemoryModel(
        stages=_stages(config, layers, num_stages),
        precision=precision,
        optimizer=config.optimizer.name,
        recompute=recompute_of_stages(config.memory.recompute, num_stages),
        whole_parameters=config.data_parallel.layout == "parameters",
        elsewhere=_elsewhere(config, device),
        bucket_bytes=config.data_parallel.bucket_bytes,
    )


def _elsewhere(config: TrainConfig, device: str) -> frozenset[str]:
    """The kinds of memory that other memory than that of `device` holds."""
    memory = config.memory
    kinds = {"optimizer": memory.offload_states, "masters": memory.offload_parameters}
    return frozenset(kind for kind, goes in kinds.items() if goes and moves(config, device))


def _stages(config: TrainConfig, layers: list[LayerMemory], num_stages: int) -> list[list[LayerMemory]]:
    cut = parse_cut(config, num_stages)
    if cut == "time":
        raise InputError(
            "parallel.cut is time: stages then follow measured times, which are not known before a run; give blocks a "
            "stage, such as --parallel.cut 5,3"
        )
    if cut == "layers":
        return in_stages(layers, even_parts(config.model.layers, num_stages))
    if cut != "parameters":
        assert not isinstance(cut, str)
        return in_stages(layers, cut)
    sizes = [layer.parameter_sizes for layer in layers]
    counts, start = partition([sum(each.values()) for each in sizes], num_stages, find_ties(sizes)), 0
    stages = []
    for count in counts:
        stages.append(layers[start : start + count])
        start += count
    return stages


def planned_memory(
    config: TrainConfig, vocabulary_size: int, *, copy: int = 0, device: str = "cuda"
) -> list[RankMemory]:
    """What every rank of one copy takes on a `device` ("cpu" is its own host: nothing moves there).

    Raises:
        InputError: options that contradict each other, or a cut that is not known.
    """
    schedule = make_schedule(config)
    program = planned_program(config, schedule, device=device)
    model = planned_model(config, vocabulary_size, schedule.num_stages, device=device)
    return memory_of_ranks(program, model, copy=copy)


def memory_rows(config: TrainConfig, vocabulary_size: int, device: torch.device) -> list[MemoryRow]:
    """Every process of a run with what it is to take; process numbers by the mesh of the configuration."""
    shape = config.mesh_shape(config.num_ranks * config.num_copies)
    rows = []
    for copy in range(config.num_copies):
        for memory in planned_memory(config, vocabulary_size, copy=copy, device=device.type):
            process = shape.process({"dp": copy, "pp": memory.rank})
            predicted: dict[str, float | None] = {**memory.kinds, "peak": memory.peak}
            rows.append(MemoryRow(process=process, copy=copy, rank=memory.rank, predicted=predicted, measured={}))
    return sorted(rows, key=lambda row: row.process)
