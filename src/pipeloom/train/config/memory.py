"""Memory of a run, from its configuration: offload, predicted memory per rank, and the choice under a cap. No torch."""

from itertools import product

from pipeloom.common.division import even_parts
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, Granularity, Program, Schedule
from pipeloom.ir.recompute import recompute_of_stages
from pipeloom.parallel.options import CPU, DataParallel, OffloadActivations, OffloadTarget, axis_of
from pipeloom.passes import lower, merge_backwards
from pipeloom.plan.memory import (
    KINDS,
    Choice,
    LayerMemory,
    MemoryModel,
    MemoryRow,
    RankMemory,
    choose_memory,
    gpt_layers,
    in_stages,
    memory_of_ranks,
)
from pipeloom.sim import CostsFile
from pipeloom.split.chain_partition import consecutive, find_ties, partition
from pipeloom.train.config.inside_stage import inside_stage
from pipeloom.train.config.schedule import make_schedule, parse_cut
from pipeloom.train.config.train_config import TrainConfig

# Offload


def offloads(config: TrainConfig, device: str) -> bool:
    """Whether the offload target differs from the memory of a `device` ("cpu", "cuda")."""
    return config.memory.offload is not None and not OffloadTarget.parse(config.memory.offload).kind == CPU == device


def activation_offload(config: TrainConfig) -> OffloadActivations | None:
    """The offload of activations; None without one."""
    target, kept = config.memory.offload, config.memory.offload_activations
    return None if target is None or kept is None else OffloadActivations(target, kept or None)


def data_axis(config: TrainConfig) -> DataAxis | None:
    """The data axis; None for one replica without master parameters."""
    return axis_of(config.shared or DataParallel(), config.number_format, config.parameter_replicas)


# Forecast


def planned_program(config: TrainConfig, schedule: Schedule, *, device: str = "cuda") -> Program:
    """The program of every replica, with the offload of activations from `device`."""
    tied = config.model.tie_embeddings and schedule.num_stages > 1
    program = lower(
        merge_backwards(schedule), tied_stages=((0, schedule.num_stages - 1),) if tied else (), data=data_axis(config)
    )
    offload = activation_offload(config) if offloads(config, device) else None
    return program if offload is None else offload.insert(program)


def planned_model(config: TrainConfig, vocabulary_size: int, num_stages: int, *, device: str = "cuda") -> MemoryModel:
    """The layers of every stage, and how they are trained on a `device`.

    Raises:
        InputError: the cut follows measured times, which are unknown here.
    """
    precision = config.number_format
    sizes, number_bytes = config.gpt(vocabulary_size), 2 if precision.has_masters else 4
    layers = gpt_layers(sizes, config.microbatch_size, number_bytes, inside_stage(config))
    offloaded = {"optimizer": config.memory.offload_states, "masters": config.memory.offload_parameters}
    return MemoryModel(
        stages=_stages(config, layers, num_stages),
        precision=precision,
        optimizer=config.optimizer.name,
        recompute=recompute_of_stages(config.memory.recompute, num_stages),
        whole_parameters=config.data_parallel.layout == "parameters",
        elsewhere=frozenset(kind for kind, goes in offloaded.items() if goes and offloads(config, device)),
        bucket_bytes=config.data_parallel.bucket_bytes,
        device="cpu" if device == "cpu" else "cuda",
        expert=config.parallel.expert,
    )


def _stages(config: TrainConfig, layers: list[LayerMemory], num_stages: int) -> list[list[LayerMemory]]:
    cut = parse_cut(config, num_stages)
    if cut == "time":
        raise InputError(
            "parallel.cut=time: the measured times are unknown before a run. Give blocks per stage, such as "
            "--parallel.cut 5,3."
        )
    if cut == "layers":
        return in_stages(layers, even_parts(config.model.layers, num_stages))
    if cut != "parameters":
        assert not isinstance(cut, str)
        return in_stages(layers, cut)
    sizes = [layer.parameter_sizes for layer in layers]
    counts = partition([sum(each.values()) for each in sizes], num_stages, find_ties(sizes))
    return consecutive(layers, counts)


def planned_memory(
    config: TrainConfig, vocabulary_size: int, *, replica: int = 0, device: str = "cuda"
) -> list[RankMemory]:
    """The predicted memory of every rank of a replica; on device "cpu" nothing is offloaded to "cpu".

    Raises:
        InputError: options that contradict each other, or a cut by measured times.
    """
    schedule = make_schedule(config)
    program = planned_program(config, schedule, device=device)
    model = planned_model(config, vocabulary_size, schedule.num_stages, device=device)
    return memory_of_ranks(program, model, replica=replica)


def memory_rows(config: TrainConfig, vocabulary_size: int, device: str) -> list[MemoryRow]:
    """The prediction for every process of a run, by process number on the mesh."""
    shape = config.mesh_shape(config.num_processes)
    rows = []
    for replica, context in product(range(config.data_degree), range(config.parallel.context)):
        holder = replica * config.parallel.context + context  # of parameters
        for memory in planned_memory(config, vocabulary_size, replica=holder, device=device):
            predicted: dict[str, float | None] = {**memory.kinds, "peak": memory.peak}
            for tensor in range(config.parallel.tensor):
                process = shape.process({"dp": replica, "pp": memory.rank, "cp": context, "tp": tensor})
                rows.append(
                    MemoryRow(process=process, replica=replica, rank=memory.rank, predicted=predicted, measured={})
                )
    return sorted(rows, key=lambda row: row.process)


def unpredicted_rows(config: TrainConfig) -> list[MemoryRow]:
    """A row for every process of a run whose memory cannot be predicted."""
    shape = config.mesh_shape(config.num_processes)
    places = [shape.coordinates(process) for process in range(config.num_processes)]
    unknown: dict[str, float | None] = dict.fromkeys((*KINDS, "peak"))
    return [
        MemoryRow(process=process, replica=place["dp"], rank=place["pp"], predicted=unknown, measured={})
        for process, place in enumerate(places)
    ]


# Cap


def under_cap(
    config: TrainConfig, vocabulary_size: int, *, device: str = "cuda", file: CostsFile | None = None
) -> tuple[TrainConfig, Choice | None]:
    """`config` with the fastest `memory.recompute` and `parallel.data_granularity` under its cap, and without the cap.

    Values given for these two options are ignored. Every process gets the same answer.

    Args:
        config: without a cap it is returned as it is.
        vocabulary_size: of the model.
        device: the kind of device that computes; "cpu" offloads nothing to "cpu".
        file: the times of stages and links that say what is fast; left out, a backward takes two forwards.

    Raises:
        InputError: nothing keeps the cap; the message has the least peak memory that is possible.
    """
    cap = config.memory.cap
    if cap is None:
        return config, None
    config = config.changed("memory", cap=None, recompute="none")
    schedule = make_schedule(config)
    model = planned_model(config, vocabulary_size, schedule.num_stages, device=device)
    ways, data = [config], data_axis(config)
    if data is not None and data.strategy.shards_gradients:
        ways = [config.changed("parallel", data_granularity=granularity.value) for granularity in Granularity]
    programs = [planned_program(way, schedule, device=device) for way in ways]
    costs, network = (None, None) if file is None else (file.costs, file.network)
    choice = choose_memory(programs, model, cap, costs=costs, network=network)
    kinds = [str(kind) for kind in choice.model.recompute]
    config = config.changed("memory", recompute=kinds[0] if len(set(kinds)) == 1 else ",".join(kinds))
    data = choice.program.data
    if data is not None and data.strategy.shards_gradients and (data.degree > 1 or data.strategy.shards_parameters):
        config = config.changed("parallel", data_granularity=data.granularity.value)
    return config, choice


def chosen_words(config: TrainConfig) -> str:
    """The options chosen under a cap, as on a command line."""
    granularity = config.parallel.data_granularity
    data = f"--parallel.data_granularity {granularity} " if granularity else ""
    return f"{data}--memory.recompute {config.memory.recompute}"


def check_background_saves(config: TrainConfig) -> None:
    """Raises InputError where checkpoints cannot be written in the background."""
    if not config.background_saves:
        return
    memory = config.memory
    if memory.offload is not None and (memory.offload_states or memory.offload_parameters):
        raise InputError(
            "background_saves=true: copies parameters and states into host memory, which memory.offload is there to "
            "spare. Remove background_saves."
        )
    if config.num_threads > 1:
        raise InputError(
            "background_saves=true: with --local, several ranks per stage are threads, which save together with the "
            "steps. Remove background_saves, or --local."
        )
