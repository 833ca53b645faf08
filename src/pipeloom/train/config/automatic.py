"""``--parallel auto``: what such a run may be given, and its processes. No torch."""

from dataclasses import replace

from pipeloom.common.cores import usable_cores
from pipeloom.errors import InputError
from pipeloom.schedules import SYNCHRONOUS, find, is_file
from pipeloom.train.config.schedule import AUTO
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import TrainConfig

KEPT = ("auto", "transport", "data_bucket_bytes")  # options of `parallel` that a plan does not choose


def for_processes(config: TrainConfig, world_size: int | None) -> TrainConfig:
    """`config` with the number of processes; without ``parallel.auto``, as it is.

    Args:
        config: as given.
        world_size: processes that torchrun started; None for the launcher.

    Raises:
        InputError: options that do not go together.
    """
    if not config.parallel.auto:
        return config
    for name, value, why in (
        ("local", config.local, "runs all ranks in this process, and the plan is for processes. Remove --local."),
        ("model.pretrained", config.model.pretrained, "times are measured for pipeloom's GPT alone. Give degrees."),
        ("plan", config.plan, "has the parallel options already. Remove --plan, or --parallel auto."),
        (
            "memory.offload",
            config.memory.offload,
            "is not among the plans of this machine. Remove it, or give degrees.",
        ),
    ):
        if value:
            shown = "true" if value is True else value
            raise InputError(f"--parallel auto with {name}={shown}: {why}")
    _check_schedule(config.schedule)
    usual = ParallelConfig()
    for name in ParallelConfig.__dataclass_fields__:
        value = getattr(config.parallel, name)
        if name not in KEPT and name != "pipeline" and value != getattr(usual, name):
            raise InputError(f"parallel.{name}={value}: --parallel auto chooses it. Remove one of them.")
    count = config.processes
    if count is not None and count < 1:
        raise InputError(f"processes={count}: must be at least 1.")
    if world_size is not None and count not in (None, world_size):
        raise InputError(f"processes={count}: torchrun started {world_size}. Remove --processes, or make both equal.")
    found = replace(config, processes=count or world_size or usable_cores())
    return found.changed("parallel", pipeline=1)


def _check_schedule(name: str) -> None:
    """Raises InputError for a schedule that plans of a run cannot have."""
    if name == AUTO or (not is_file(name) and name in SYNCHRONOUS and not find(name).to_measure):
        return
    if not is_file(name):
        find(name)  # says which names there are
    raise InputError(
        f"--parallel auto with schedule={name}: plans have synchronous schedules that need no measured times, such as "
        "1f1b. Remove --schedule, or give degrees."
    )


def without_plan(config: TrainConfig) -> TrainConfig:
    """What can be validated before there is a plan: one rank, any schedule, and no limit of memory."""
    return replace(config.changed("memory", cap=None), schedule="auto") if config.parallel.auto else config
