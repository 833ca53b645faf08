"""`UnitStore`: the parameters of one rank in units, gathered, freed and reduced where the program says so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from torch import Tensor, nn

from pipeloom.engine.overlap_times import OverlapTimes
from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.parameter_bytes import Gauge, HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.errors import RunError
from pipeloom.ir import Action, DataAxis, DataStrategy, Granularity, Op, Program
from pipeloom.parallel.data.buckets import BucketRule
from pipeloom.parallel.data.flat_layout import FlatLayout
from pipeloom.parallel.data.layer_hooks import LayerGathers
from pipeloom.parallel.data.main_parameters import away, open_mover, value_of
from pipeloom.parallel.data.parameter_formats import DTYPES, Formats
from pipeloom.parallel.data.reductions import Reductions
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.stage_parameters import (
    cast_tables,
    claim,
    group_parameters,
    refuse_sparse,
    release,
    units_of,
    units_of_layers,
    with_statistics,
)
from pipeloom.parallel.data.unit import Unit
from pipeloom.parallel.options import DataParallel, Precision
from pipeloom.split.module import StageModule


class UnitStore(ParameterStore):
    """What one rank holds, shared with other copies of the pipeline.

    Why not DistributedDataParallel or `fully_shard`, whose collectives these are: their hooks run where autograd's
    engine ends, which is in I and not in W where a backward is split; they reduce after every backward or not at all,
    scale or drop gradients of earlier steps, and know nothing of parameters that other stages hold too. A program
    says when what is gathered and reduced.

    Args:
        stages, held, homes, layers: see `Sharing.store`.
        axis: how copies share the work.
        data, precision: what the user asked for.
        copies: those who share it.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        held: Mapping[str, nn.Parameter],
        homes: Mapping[str, tuple[int, ...]],
        layers: Sequence[Sequence[str]],
        axis: DataAxis,
        data: DataParallel,
        precision: Precision,
        copies: ReplicaGroup,
    ) -> None:
        self._axis, self._data, self._precision, self._copies = axis, data, precision, copies
        refuse_sparse(stages)
        if axis.unshards:
            claim(held)
        self.times = copies.times = OverlapTimes()
        self.gathered, self.reduced = Gauge(), Gauge()
        self._mover = open_mover(data.offload)
        self._modules = list(stages.values())
        self._wide = with_statistics(self._modules)
        self._units: list[Unit] = []
        self._by_stage: dict[int, list[Unit]] = {}
        self._gathers: dict[int, LayerGathers] = {}
        self._unbound: dict[int, list[Unit]] = {}  # what the last UNSHARD that was bound starts, where that is open
        unit_of: dict[nn.Parameter, Unit] = {}
        rule = BucketRule.of(axis.granularity, data.bucket_bytes, whole_parameters=data.layout == "parameters")
        for stage, module in stages.items():
            loads = [0] * copies.degree  # of the stage: every rank that holds it lays it out alike
            for group in group_parameters(module, layers[stage], held, homes, rule, self._num_bytes):
                new = {name: parameter for name, parameter in group.items() if parameter not in unit_of}
                if new:
                    tied = len(homes[next(iter(new))]) > 1
                    unit = self._make_unit(new, [0] * copies.degree if tied else loads)
                    self._units.append(unit)
                    unit_of.update(dict.fromkeys(new.values(), unit))
            self._by_stage[stage] = units_of(module, unit_of)
            if isinstance(module, StageModule) and axis.unshards:
                found = units_of_layers(module, layers[stage], unit_of)
                one_by_one = axis.shards_parameters and axis.granularity is Granularity.MICROBATCH
                self._gathers[stage] = module.observer = LayerGathers(found, one_by_one=one_by_one)
        main = {name: parameter for unit in self._units for name, parameter in unit.main.items()}
        self.parameters = {name: main[name] for name in held}
        self.ranges = {name: span for unit in self._units for name, span in unit.ranges.items()}
        if precision.has_masters:
            cast_tables(stages.values(), DTYPES[precision.dtype])
        self._users: dict[Unit, set[int]] = {unit: set() for unit in self._units}  # stages that hold it gathered
        self._reductions = Reductions(self._units, self._by_stage, axis, copies, self._look)
        self._open = False

    def _make_unit(self, parameters: Mapping[str, nn.Parameter], loads: list[int]) -> Unit:
        strategy, sizes = self._axis.strategy, [parameter.numel() for parameter in parameters.values()]
        if strategy in (DataStrategy.DDP, DataStrategy.PARAMETER_SERVER):
            layout = FlatLayout.by_elements(sizes, 1)
        elif self._data.layout == "parameters":
            layout = FlatLayout.by_parameters(sizes, loads)
        else:
            layout = FlatLayout.by_elements(sizes, self._copies.degree)
        formats = self._formats(next(iter(parameters.values())))
        return Unit(parameters, layout, formats, strategy, self._copies, self.gathered, self._mover)

    def _num_bytes(self, parameter: nn.Parameter) -> int:
        """In the format of forwards."""
        return parameter.numel() * self._formats(parameter).compute.itemsize

    def _formats(self, parameter: nn.Parameter) -> Formats:
        return Formats.of(parameter.dtype, self._precision, stays=parameter in self._wide)

    # One run

    def begin(self, program: Program) -> None:
        for unit in self._units:
            unit.stale()
            if not program.schedule.forward_only:
                unit.gradients.begin()
        self._open = not program.schedule.forward_only
        self.gathered.restart()
        self.reduced.restart()

    def bind(self, action: Action, program: Program) -> Step:
        stage, op = action.stage, action.op
        if op is Op.UNSHARD:
            gathers = self._gathers.get(stage)
            first: list[Unit] = [] if gathers and gathers.one_by_one else self._by_stage[stage]
            if not first:
                self._unbound[stage] = first
            return (lambda: self._unshard(stage, first)), None
        if op is Op.RESHARD:
            return (lambda: self._reshard(stage)), None
        return self._reductions.completion(action, program).flush, None

    def around(self, action: Action, step: Step, program: Program) -> Step:
        if action.op is not Op.W and self._axis.unshards:
            step = self._with_parameters(action, step)
        reduction = action.with_op(Op.REDUCE_GRAD)
        backward = action.op in (Op.B, Op.W) and self._copies.degree > 1
        if not backward or reduction not in program.data_reductions:
            return step
        (run, ready), completion = step, self._reductions.completion(reduction, program)
        armed, gathers = completion.armed, self._gathers.get(action.stage)
        if action.op is Op.B and gathers is not None and gathers.one_by_one:
            armed = partial(gathers.completing, completion)

        def last_backward() -> None:
            with armed():
                run()

        return last_backward, ready

    def _with_parameters(self, action: Action, step: Step) -> Step:
        """A computation that waits for the parameters that it reads."""
        (run, ready), units, gathers = step, self._by_stage[action.stage], self._gathers.get(action.stage)
        forward = action.op is Op.F
        if gathers is None:

            def computation() -> None:
                for unit in units:
                    unit.wait()
                run()

            return computation, ready
        if action.stage in self._unbound:
            self._unbound.pop(action.stage).extend(gathers.first(forward=forward))
        elsewhere = [unit for unit in units if all(unit not in layer for layer in gathers.layers)]

        def layered_computation() -> None:
            for unit in elsewhere:
                unit.wait()
            gathers.begin(forward=forward)
            run()

        return layered_computation, ready

    def _unshard(self, stage: int, first: Sequence[Unit]) -> None:
        for unit in self._by_stage[stage]:
            self._users[unit].add(stage)
        for unit in first:
            unit.prefetch()
            if not unit.waits_for_reads:
                unit.start_gather()

    def _reshard(self, stage: int) -> None:
        for unit in self._by_stage[stage]:
            users = self._users[unit]
            users.discard(stage)
            if not users:
                unit.free()

    def finish(self) -> None:
        if not self._open:
            return
        self._open = False
        self._reductions.finish(self.loss_scale)

    def end(self) -> None:
        self._open = False
        self._reductions.drop()
        for unit in self._units:
            self._users[unit].clear()
            with suppress(RunError):  # of a gather that nobody needs; it would hide the error that ended the run
                unit.free()

    def close(self) -> None:
        for module in self._modules:
            if isinstance(module, StageModule):
                module.observer = None
        if not self._axis.shards_parameters:
            release(self._modules)
        if self._mover is not None:
            self._mover.stop()  # what is in its store stays, for `whole`

    # Values

    def _look(self, flat: Tensor | None) -> None:
        if self.records_peaks:
            self.reduced.set(self.held_bytes().gradients + (0 if flat is None else flat.nbytes))

    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        return {stage: [unit.sent_bytes for unit in units] for stage, units in self._by_stage.items()}

    def held_bytes(self) -> HeldBytes:
        tensors = (tensor for unit in self._units for tensor in unit.gradients.tensors())
        return HeldBytes.of(self._modules, self.parameters.values(), tensors)

    def peak_bytes(self) -> PeakBytes:
        return PeakBytes(self.gathered.peak, self.reduced.peak)

    @property
    def away(self) -> Offloaded:
        return away(self.parameters.values(), self._mover)

    def value(self, name: str) -> Tensor:
        return value_of(self.parameters[name])

    def whole(self) -> dict[str, Tensor]:
        return {name: value for unit in self._units for name, value in unit.whole().items()}

    @contextmanager
    def writable(self) -> Iterator[None]:
        for unit in self._units:
            unit.make_writable()
        try:
            yield
        finally:
            for unit in self._units:
                unit.free()

    def assign(self, values: Mapping[str, Tensor]) -> None:
        for unit in self._units:
            unit.assign(values)

    def refresh(self) -> None:
        if not self._axis.shards_parameters:
            for unit in self._units:
                unit.stale()
                unit.start_gather()
            for unit in self._units:
                unit.wait()
