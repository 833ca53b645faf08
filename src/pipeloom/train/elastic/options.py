"""What ``--elastic`` may be given with. No torch."""

from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.train.config.train_config import TrainConfig

CONFIGURED = "_PIPELOOM_CONFIGURED"  # variable: the configuration as given, where that of a rank has another layout


def check_elastic(config: TrainConfig, schedule: Schedule) -> None:
    """Raises InputError where a run cannot go on with another number of ranks, or its limits contradict each other."""
    if not config.elastic:
        return
    if config.local:
        raise InputError("elastic=true: with --local, one process holds all ranks. Remove one of them.")
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"elastic=true: with schedule {schedule.name!r}, gradients are as stale as there are stages, so another "
            "number of stages trains another way. Use a synchronous schedule such as 1f1b, or remove --elastic."
        )
    if config.parallel.auto:
        raise InputError(
            "elastic=true: --parallel auto measures each layout before it runs. Give degrees, or remove --elastic."
        )
    if config.max_ranks is not None and config.max_ranks < config.min_ranks:
        raise InputError(f"max_ranks={config.max_ranks}: below min_ranks={config.min_ranks}. Lower min_ranks.")
    check_reroute(config)
    if not config.preempt_seconds:
        raise InputError(
            "preempt_seconds=0: with --elastic, ranks save a checkpoint before the run goes on with more of them. Give "
            "them time, such as 30."
        )


def check_reroute(config: TrainConfig) -> None:
    """Raises InputError where a data-parallel peer could not compute the micro-batches of a lost rank."""
    if not config.reroute:
        return
    parallel = config.parallel
    if not config.has_peers:
        raise InputError(
            f"reroute=true: with parallel.data={parallel.data}, no other rank holds the stage of a lost rank. Use "
            "--parallel.data 2 or more, or remove --reroute."
        )
    others = {
        f"parallel.data_strategy={parallel.data_strategy}": parallel.data_strategy != "ddp",
        f"parallel.tensor={parallel.tensor}": parallel.tensor > 1,
        f"parallel.context={parallel.context}": parallel.context > 1,
        f"parallel.slices={parallel.slices}": parallel.slices is not None,
        f"model.experts={config.model.experts}": bool(config.model.experts),
    }
    if (other := next((name for name, is_so in others.items() if is_so), None)) is not None:
        raise InputError(
            f"reroute=true with {other}: peers compute the micro-batches of a lost rank where each rank holds a whole "
            "stage and runs whole micro-batches of a model without experts. Remove one of them."
        )
