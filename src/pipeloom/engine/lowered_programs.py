"""The checked programs of a pipeline: one for `step`, one for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipeloom.errors import InputError
from pipeloom.ir import DataAxis, Program, Schedule, check
from pipeloom.passes import evaluation_schedule, lower


class Programs(NamedTuple):
    """The programs that every rank of a pipeline runs."""

    train: Program
    forward: Program

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        tied_stages: Sequence[tuple[int, ...]],
        data: DataAxis | None,
        insert_offload: Callable[[Program], Program] | None,
    ) -> Programs:
        """Lower and check both programs.

        Args:
            schedule: of every step.
            tied_stages: for each parameter that several stages hold, the stages.
            data: how data-parallel replicas share parameters and gradients; None: there is one replica.
            insert_offload: the pass that adds OFFLOAD and RELOAD; None: activations stay in memory.

        Raises:
            InputError: an illegal schedule, or an asynchronous one with `data`.
        """
        if data is not None and schedule.microbatches_per_update is not None:
            raise InputError(
                f"schedule {schedule.name!r} updates parameters while it runs: data parallelism, ZeRO and 16-bit "
                "formats need a synchronous schedule. Give stages replicas of their own, or use a schedule such as "
                "1f1b."
            )
        train = lower(schedule, tied_stages=tuple(tied_stages), data=data)
        if insert_offload is not None and not schedule.forward_only:
            train = insert_offload(train)
        forward = lower(evaluation_schedule(schedule), data=data)
        check(train)
        check(forward)
        return cls(train, forward)
