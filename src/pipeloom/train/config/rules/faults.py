"""Options about lost ranks, spikes of the loss, and values that are not finite."""

from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.train.config.train_config import AUTO, TrainConfig


def check_recovery(config: TrainConfig) -> None:
    """Raises InputError where processes could not be replaced, or ranks that start again would measure another cut."""
    measured = {
        "parallel.auto=true": config.parallel.auto,
        "parallel.cut=time": config.parallel.cut == "time",
        f"parallel.slices={AUTO}": config.parallel.slices == AUTO,
    }
    if config.spare:
        raise InputError(
            f"spare={config.spare}: must be 0. All ranks are forked from one process, which waits without --spare. "
            "Remove --spare."
        )
    if not config.recover:
        return
    if config.local:
        raise InputError("recover=true: with --local, one process holds all ranks. Remove one of them.")
    if (name := next((name for name, is_so in measured.items() if is_so), None)) is not None:
        raise InputError(
            f"recover=true: {name} is measured again by ranks that start again, and could differ. Name the values, or "
            "remove --recover."
        )


def check_spikes(config: TrainConfig, schedule: Schedule) -> None:
    """Raises InputError where options about spikes and values that are not finite do not fit the others."""
    for name, value in (("on_spike", config.on_spike), ("on_nonfinite", config.on_nonfinite)):
        _check_leaving_out(config, schedule, name, value)
    if config.on_spike == "rewind" and not config.save_steps:
        raise InputError("on_spike=rewind: goes back to a checkpoint, and save_steps=0 saves none. Raise save_steps.")
    if config.on_nonfinite == "retry" and config.graphs:
        raise InputError(
            "on_nonfinite=retry: does not work with graphs=true, which replays steps without checks. Use stop, or "
            "remove graphs."
        )


def _check_leaving_out(config: TrainConfig, schedule: Schedule, name: str, value: str) -> None:
    """Raises InputError where an update cannot be left out, because it is made before the global norm is known."""
    default = getattr(TrainConfig(), name)
    if value == default:
        return
    if schedule.microbatches_per_update is not None:
        raise InputError(
            f"{name}={value}: does not work with schedule {config.schedule!r}, whose stages update at "
            f"different times. Use {default}, or a synchronous schedule such as 1f1b."
        )
    if not config.optimizer.barrier:
        raise InputError(
            f"{name}={value}: does not work with optimizer.barrier=false, which updates before the global "
            f"norm is known. Use {default}, or remove optimizer.barrier."
        )
