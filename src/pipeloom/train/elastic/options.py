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
    if not config.preempt_seconds:
        raise InputError(
            "preempt_seconds=0: with --elastic, ranks save a checkpoint before the run goes on with more of them. Give "
            "them time, such as 30."
        )
