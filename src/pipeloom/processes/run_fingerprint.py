"""What the processes of a pipeline have to agree on before they exchange anything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from hashlib import blake2b
from typing import NamedTuple

import torch.distributed as dist

from pipeloom.errors import InputError
from pipeloom.ir import Program
from pipeloom.processes.collectives import all_gather_bytes


class RunFingerprint(NamedTuple):
    """What one process is about to run.

    Attributes:
        summary: in words.
        digest: of all that has to be the same.
    """

    summary: str
    digest: str

    @classmethod
    def of(
        cls,
        program: Program,
        layers: Sequence[Sequence[str]],
        slices: Sequence[int] | None,
        others: Sequence[str] = (),
    ) -> RunFingerprint:
        """The terms of a training program on a model of these `layers`, stage by stage, and `others`."""
        schedule = program.schedule
        cut = f", {schedule.num_slices} slices" if schedule.num_slices > 1 else ""
        orders = [" ".join(map(str, order)) for order in program.orders]
        shape = [
            schedule.num_microbatches,
            schedule.num_slices,
            schedule.placement.replicas,
            slices,
            program.gradient_groups,
            [schedule.weights, schedule.microbatches_per_update],
            program.data and astuple(program.data),
            *others,
        ]
        digest = blake2b(json.dumps([orders, shape, layers]).encode(), digest_size=16).hexdigest()
        sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
        return cls(f"{schedule.name!r} of {sizes}{cut}", digest)

    def agree(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        """Every process of `group` calls it.

        Raises:
            InputError: on all of them, where two differ.
            PeerLost: one of them ended, or did not come in time.
        """
        lost = "another rank ended, or did not come in time, before all had made their Pipeline; see what it said"
        told = all_gather_bytes(json.dumps(self).encode(), group, lost=lost, timeout_seconds=timeout_seconds)
        first, *others = [RunFingerprint(*json.loads(terms)) for terms in told]
        for rank, other in enumerate(others, 1):
            if other.summary != first.summary:
                raise InputError(
                    f"rank 0 has schedule {first.summary} and rank {rank} {other.summary}: all ranks run one schedule; "
                    "pass the same on each"
                )
            if other.digest != first.digest:
                raise InputError(
                    f"ranks 0 and {rank} both have schedule {first.summary}, but their orders, cuts, slices, tied "
                    "parameters, data axes or formats differ: all ranks run the same; pass the same model and "
                    "arguments on each"
                )
