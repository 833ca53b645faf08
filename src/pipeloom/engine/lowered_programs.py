"""The programs of a pipeline, checked: what `step` runs, and what evaluations run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeloom.engine.binders.activation_offload import OffloadOptions
from pipeloom.engine.stores.parameter_store import Sharing
from pipeloom.errors import InputError
from pipeloom.ir import Program, Schedule, check
from pipeloom.passes import evaluation_schedule, lower


class Programs(NamedTuple):
    """What every rank of a pipeline runs."""

    train: Program
    forward: Program

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        tied_stages: Sequence[tuple[int, ...]],
        sharing: Sharing,
        offload: OffloadOptions | None,
    ) -> Programs:
        """Those of a schedule.

        Args:
            schedule: of every step.
            tied_stages: for each parameter that several stages hold, the stages.
            sharing: what copies of the pipeline share.
            offload: of activations.

        Raises:
            InputError: an illegal schedule, or one that does not go with copies, masters or shards.
        """
        if sharing.axis is not None and schedule.microbatches_per_update is not None:
            raise InputError(
                f"schedule {schedule.name!r} updates while it runs: copies of a pipeline, masters and shards are for "
                "schedules that flush; give stages replicas of their own, or take a schedule such as 1f1b"
            )
        train = lower(schedule, tied_stages=tuple(tied_stages), data=sharing.axis)
        if offload is not None and not schedule.forward_only:
            train = offload.insert(train)
        forward = lower(evaluation_schedule(schedule), data=sharing.axis)
        check(train)
        check(forward)
        return cls(train, forward)
