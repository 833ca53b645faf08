"""``memory.cap``: the quickest way to train under a number of bytes a rank, chosen before anything is made."""

from __future__ import annotations

from dataclasses import replace

from pipeloom.ir import Granularity
from pipeloom.plan.memory import Choice, choose_memory
from pipeloom.sim import CostsFile
from pipeloom.train.config.memory_check import likely_device
from pipeloom.train.config.memory_forecast import data_axis, planned_model, planned_program
from pipeloom.train.config.schedule_choice import make_schedule
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.data.tokenizers import load_tokenizer


def under_cap(
    config: TrainConfig, vocabulary_size: int, *, device: str = "cuda", file: CostsFile | None = None
) -> tuple[TrainConfig, Choice | None]:
    """The configuration with `memory.recompute` and `parallel.data_granularity` as its cap wants them, without the cap.

    What it says of those two counts for nothing; everything else stays. The same answer on every process.

    Args:
        config: without a cap it is returned as it is.
        vocabulary_size: of its model.
        device: the kind of device that computes; what moves to "cpu" saves nothing there if that is the CPU.
        file: the times of stages and links, by which quick is meant; left out, a backward takes two forwards.

    Raises:
        InputError: no way keeps the cap; the message has the least that a rank takes.
    """
    cap = config.memory.cap
    if cap is None:
        return config, None
    config = replace(config, memory=replace(config.memory, cap=None, recompute="none"))
    schedule = make_schedule(config)
    model = planned_model(config, vocabulary_size, schedule.num_stages, device=device)
    programs = [planned_program(way, schedule, device=device) for way in _ways(config)]
    costs, network = (None, None) if file is None else (file.costs, file.network)
    choice = choose_memory(programs, model, cap, costs=costs, network=network)
    return _with(config, choice), choice


def _ways(config: TrainConfig) -> list[TrainConfig]:
    """`config` with every granularity that its strategy has."""
    data = data_axis(config)
    if data is None or not data.shards_gradients:
        return [config]
    return [
        replace(config, parallel=replace(config.parallel, data_granularity=granularity.value))
        for granularity in Granularity
    ]


def check_cap(config: TrainConfig) -> None:
    """Raises InputError where nothing keeps a run here under its cap; slices that are yet to be found may help."""
    if config.parallel.slices != "auto":
        under_cap(config, load_tokenizer(config.data.tokenizer).vocabulary_size, device=likely_device())


def _with(config: TrainConfig, choice: Choice) -> TrainConfig:
    """`config` with what was chosen."""
    kinds = [str(kind) for kind in choice.model.recompute]
    recompute = kinds[0] if len(set(kinds)) == 1 else ",".join(kinds)
    data, parallel = choice.program.data, config.parallel
    if data is not None and data.shards_gradients and (data.degree > 1 or data.shards_parameters):
        parallel = replace(parallel, data_granularity=data.granularity.value)
    return replace(config, parallel=parallel, memory=replace(config.memory, recompute=recompute))


def chosen_words(config: TrainConfig) -> str:
    """The options that a cap has chosen, as they are written on a command line."""
    granularity = config.parallel.data_granularity
    data = f"--parallel.data_granularity {granularity} " if granularity else ""
    return f"{data}--memory.recompute {config.memory.recompute}"
