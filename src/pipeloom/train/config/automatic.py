"""``--parallel auto`` and ``--schedule auto``: what such a run may be given, and its processes. No torch."""

from dataclasses import replace

from pipeloom.common.cores import usable_cores
from pipeloom.errors import InputError
from pipeloom.schedules import SYNCHRONOUS, find, is_file
from pipeloom.train.config.sections import ParallelConfig
from pipeloom.train.config.train_config import AUTO, TrainConfig

KEPT = ("auto", "transport", "data_bucket_bytes")  # options of `parallel` that a plan does not choose
_ONLY_STALE = "is for asynchronous schedules, and plans have synchronous ones. Remove it, or give degrees."


def for_processes(config: TrainConfig, world_size: int | None) -> TrainConfig:
    """`config`, validated as far as the run chooses it; with ``parallel.auto``, with the number of processes.

    Args:
        config: as given.
        world_size: processes that torchrun started; None for the launcher.

    Raises:
        InputError: options that do not go together.
    """
    if not config.parallel.auto:
        if config.schedule == AUTO:
            _check_open_schedule(config)
        return config
    if config.schedule == AUTO:
        config = replace(config, schedule=None)
    for name, value, why in (
        ("local", config.local, "runs all ranks in this process, and the plan is for processes. Remove --local."),
        ("model.pretrained", config.model.pretrained, "times are measured for pipeloom's GPT alone. Give degrees."),
        ("plan", config.plan, "has the parallel options already. Remove --plan, or --parallel auto."),
        (
            "memory.offload",
            config.memory.offload,
            "is not among the plans of this machine. Remove it, or give degrees.",
        ),
        ("optimizer.replica_scaling", config.optimizer.replica_scaling, _ONLY_STALE),
        ("optimizer.staleness", config.optimizer.staleness != "none" and config.optimizer.staleness, _ONLY_STALE),
    ):
        if value:
            shown = "true" if value is True else value
            raise InputError(f"--parallel auto with {name}={shown}: {why}")
    microbatches = config.batch.microbatches
    if microbatches is not None and microbatches < 1:
        raise InputError(f"batch.microbatches={microbatches}: must be at least 1.")
    if config.batch.size % (microbatches or 1):
        raise InputError(
            f"--parallel auto with batch.microbatches={microbatches}: plans have micro-batches of equal "
            f"sizes, and batch.size={config.batch.size} is not divisible. Change one of them, or give degrees."
        )
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


def _check_schedule(name: str | None) -> None:
    """Raises InputError for a schedule that plans of a run cannot have."""
    if name is None or (not is_file(name) and name in SYNCHRONOUS and not find(name).to_measure):
        return
    if not is_file(name):
        find(name)  # says which names there are
    raise InputError(
        f"--parallel auto with schedule={name}: plans have synchronous schedules that need no measured times, such as "
        "1f1b. Remove --schedule, or give degrees."
    )


def without_plan(config: TrainConfig) -> TrainConfig:
    """What can be validated before there is a plan: one rank, or any schedule, and no limit of memory.

    Raises:
        InputError: no schedule that ``--schedule auto`` chooses from runs with the options.
    """
    if not config.measures_plan:
        return config
    config = config.changed("memory", cap=None)
    if config.parallel.auto:
        return replace(config, schedule=None)
    from pipeloom.train.config.schedule_choices import schedule_choices  # here: imports the planner

    return next(schedule_choices(config))


# The schedule alone


def _check_open_schedule(config: TrainConfig) -> None:
    """Raises InputError where a run cannot measure which schedule is the fastest."""
    parallel = config.parallel
    of_slices, of_cut = parallel.slices == AUTO and AUTO, parallel.cut == "time" and "time"
    for name, value, why in (
        ("local", config.local, "runs all ranks in this process, and schedules are compared between processes"),
        ("model.pretrained", config.model.pretrained, "times are measured for pipeloom's GPT alone"),
        ("parallel.replicas", parallel.replicas, "1f1b is the only synchronous schedule with several ranks per stage"),
        ("parallel.slices", of_slices, "slices are measured for one schedule"),
        ("parallel.cut", of_cut, "stages are cut by measured times once the schedule is known"),
        ("recover", config.recover, "ranks that start again would measure again, and could choose another schedule"),
        ("elastic", config.elastic, "each layout would be measured before it runs"),
    ):
        if value:
            shown = "true" if value is True else value
            raise InputError(f"schedule=auto with {name}={shown}: {why}. Name a schedule, or remove {name}.")
