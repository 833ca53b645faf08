"""`BatchIntake`: the batch of each call, as all ranks have read it.

Where every micro-batch runs on every rank, a step needs no agreement: a rank that refuses its batch tells its
neighbours in place of the values that they wait for (`refusals`), and the ranks then exchange why. All other calls
begin with an agreement.
"""

from collections.abc import Callable, Mapping

import torch

from pipeloom.devices import Device, HostDevice
from pipeloom.engine.batch import Batch
from pipeloom.engine.calls.agreement import BatchAgreement, LineExchange, MembersExchange, RankCall, different_forms
from pipeloom.engine.calls.equal_seeds import drawing_state
from pipeloom.engine.calls.reader import Batching, BatchReader, Programs
from pipeloom.engine.calls.refusals import all_ranks_run_all_microbatches
from pipeloom.engine.model_state import ModelState
from pipeloom.transport.call_numbers import Call, call_number
from pipeloom.transport.connect import Connection
from pipeloom.transport.interface import Channel
from pipeloom.transport.values import Value


class BatchIntake:
    """Reads the batches of this process.

    Args:
        devices: where each rank of this process computes.
        state, programs, connection, batching: as for `Executor`.

    Attributes:
        channels: over which ranks agree, to be opened before the first call.
        refuses_in_messages: whether steps need no agreement.
    """

    def __init__(
        self,
        devices: Mapping[int, Device],
        state: ModelState,
        programs: Programs,
        connection: Connection,
        batching: Batching,
    ) -> None:
        self._state, self._sliced = state, batching.sliced
        self._has_values = self._seeds_are_equal = False
        last = programs.train.placement.num_stages - 1
        self._reader = BatchReader(
            reads_inputs=_device_of_stage(0, devices, state),
            reads_targets=_device_of_stage(last, devices, state),
            programs=programs,
            sharing=state.sharing,
            how=batching,
        )
        alone = not state.sharing.replica_ranks and not state.sharing.blocks.divides
        self.refuses_in_messages = alone and all_ranks_run_all_microbatches(programs.train)
        self._agreement: BatchAgreement | None = None
        self._line: LineExchange | None = None
        if connection.rank is not None and self.refuses_in_messages:
            self._line = LineExchange(connection.rank, programs.train, connection.transport)
            line = [range(programs.train.num_ranks)]
            self._agreement = BatchAgreement(self._line, line, (), line)
        elif connection.members is not None:
            exchange = MembersExchange(connection.members, connection.timeout_seconds)
            self._agreement = BatchAgreement(
                exchange,
                connection.replicas,
                state.sharing.replica_ranks,
                connection.batches,
                state.sharing.blocks.lines,
            )
        self.channels: set[Channel] = set() if self._line is None else self._line.channels

    def read(
        self, read: Callable[[], tuple[Value, Value]], kind: Call, count: int, *, with_loss: bool, settings: str = ""
    ) -> Batch:
        """The micro-batches of this process in call `count`; see `BatchReader.read`."""
        training, blocks = kind is Call.STEP, self._state.sharing.blocks
        agreement = None if training and self.refuses_in_messages else self._agreement

        def read_with_values() -> tuple[Value, Value]:
            if not self._has_values:
                self._state.check_values()
                self._has_values = True
            return read()

        compares = training and bool(blocks.lines) and not (self._sliced or self._seeds_are_equal)
        call = RankCall(call_number(count, kind), settings, drawing_state(self._state.modules()) if compares else 0)
        batch = self._reader.read(read_with_values, agreement, call, training=training, with_loss=with_loss)
        self._seeds_are_equal = self._seeds_are_equal or compares
        if self._sliced and training:
            batch.seed = blocks.common(int(torch.randint(2**63 - 1, ())))
        return batch

    @property
    def exchanges_reasons(self) -> bool:
        """Whether ranks exchange why a step was refused, once all of them know that it was."""
        return self._line is not None

    def reason(self, text: str, forms: tuple[str, str], refused: int) -> str:
        """Why the ranks refused a step; every rank calls it.

        Args:
            text: why this rank did; empty: it did not, or ranks have batches of different forms.
            forms: of the batch of this rank.
            refused: the number of the call; the next is that of this exchange.
        """
        assert self._line is not None
        self._line.last_refused = refused
        rows = self._line.gather("\n".join((*forms, text)), call_number(refused + 1, Call.STEP))
        found = [row.split("\n", 2) for row in rows]
        texts = [reason for *_, reason in found if reason]
        return text or next(iter(texts), "") or different_forms(found, [range(len(found))])


def _device_of_stage(stage: int, devices: Mapping[int, Device], state: ModelState) -> Device | None:
    """Where the ranks of this process compute the stage, the CPU where they differ; None: none of them has it."""
    found = dict.fromkeys(devices[rank] for rank, stages in state.stages_of.items() if stage in stages)
    return None if not found else next(iter(found)) if len(found) == 1 else HostDevice()
