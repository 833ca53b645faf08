"""What the stages of a stream declared, batch by batch."""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from pipeloom.engine.batch import Declared, ForwardKey
from pipeloom.engine.worker import Worker
from pipeloom.errors import InputError
from pipeloom.ir import Schedule
from pipeloom.ir.recompute import Recompute
from pipeloom.training.observations import Entry, Observations, Observed, listens, observed_in, vector_of


def check_listeners(workers: Mapping[int, Worker], schedule: Schedule) -> None:
    """Raises InputError for modules with ``after_step`` in stages that cannot call it exactly."""
    for worker in workers.values():
        for stage, module in worker.stages.items():
            name = next((type(part).__name__ for part in module.modules() if listens(part)), None)
            if name is None:
                continue
            replicas = len(schedule.placement.replicas[stage])
            if replicas > 1:
                raise InputError(
                    f"stage {stage} has {name}.after_step and {replicas} replicas in schedule {schedule.name!r}: each "
                    "would count its own micro-batches alone. Use a schedule with one replica per stage."
                )
            if worker.state.wiring.recompute[stage] is not Recompute.NONE:
                raise InputError(
                    f"stage {stage} has {name}.after_step and recompute='{worker.state.wiring.recompute[stage].value}' "
                    "in a stream: recomputations would find other buffers than their forwards. Use 'none' for this "
                    "stage."
                )


class StreamObservations:
    """One process's sums of one run.

    Args:
        observations: of the pipeline.
        declared: filled by the forwards of this process.
        batch_size: micro-batches per batch.
    """

    def __init__(self, observations: Observations, declared: dict[ForwardKey, Declared], batch_size: int) -> None:
        self._observations, self._declared, self._size = observations, declared, batch_size
        self._of_batch: dict[int, dict[Entry, Tensor]] = {}
        self._lock = threading.Lock()  # ranks of one process may have a thread each

    def update(self, worker: Worker, stage: int, microbatches: range) -> None:
        """A stage makes an update of `microbatches`, of which some ran here: adds up what they declared."""
        sums: dict[Entry, Tensor] = {}
        for first in range(microbatches.start, microbatches.stop, self._size):
            keys: list[ForwardKey] = [(stage, b, None) for b in range(first, first + self._size)]
            popped = {key: found for key in keys if (found := self._declared.pop(key, None)) is not None}
            table = self._observations.table(popped)
            with self._lock:
                of_batch = self._of_batch.setdefault(first // self._size, {})
                for entry, part in table.items():
                    of_batch[entry] = part if entry not in of_batch else of_batch[entry] + part
            for entry, part in table.items():
                sums[entry] = part if entry not in sums else sums[entry] + part
        if not any(map(listens, worker.stages[stage].modules())):
            return
        quantities = observed_in(list(sums), vector_of(sums, list(sums), 1.0)).quantities
        self._observations.call_listeners_of(worker.stages[stage], quantities)

    def gather(
        self, num_batches: int, samples: Mapping[int, int], sum_over_pipelines: Callable[[Tensor], Tensor]
    ) -> list[Observed]:
        """The sums of every batch over all processes, which all call it; `samples` are those of each batch."""
        entries = self._observations.agreed({entry for table in self._of_batch.values() for entry in table})
        if not entries:
            return [Observed({}, {}, {}) for _ in range(num_batches)]
        counts = self._observations.counts_samples
        rows = [
            vector_of(self._of_batch.get(batch, {}), entries, samples[batch] if counts else 0)
            for batch in range(num_batches)
        ]
        return [observed_in(entries, row) for row in sum_over_pipelines(torch.stack(rows))]
