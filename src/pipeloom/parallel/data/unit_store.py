"""`UnitStore`: the parameters of one rank in units, gathered, freed and reduced when the program says so."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import Wait, no_wait
from pipeloom.engine.rank_state import Step
from pipeloom.engine.stores.held_bytes import Gauge, HeldBytes, Offloaded, PeakBytes
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.engine.stores.sharing import RankModules
from pipeloom.errors import InputError, RunError
from pipeloom.ir import Action, DataAxis, Op, Program
from pipeloom.parallel.data.buckets import BucketRule, ParameterUse, group_parameters, units_by_layer
from pipeloom.parallel.data.layer_hooks import LayerHooks, parameter_uses
from pipeloom.parallel.data.reductions import Reductions
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.replica_groups import ReplicaGroups
from pipeloom.parallel.data.unit import Unit
from pipeloom.parallel.data.unit_layout import FlatLayout, expert_axis
from pipeloom.parallel.mixed_precision import DTYPES, NumberFormats, cast_tables, with_statistics
from pipeloom.parallel.offload.main_parameters import offloaded_parameter
from pipeloom.parallel.offload.mover import Mover
from pipeloom.parallel.offload.store import open_store
from pipeloom.parallel.options import DataParallel, OffloadTarget, Precision
from pipeloom.split.stage_module import StageModule

_HELD = "_held_in_units"  # an attribute of parameters in a store


class UnitStore(ParameterStore):
    """The parameters of one rank, shared with the other replicas.

    Why not DistributedDataParallel or `fully_shard`, which use the same collectives: their hooks run when autograd's
    engine ends, which is in I and not in W where a backward is split. They reduce after every backward or not at all,
    scale or drop gradients of earlier steps, and know no parameters that several stages hold. Here a program says when
    each unit is gathered and reduced (`pipeloom.ir.unit_actions`).
    """

    def __init__(
        self, rank: RankModules, axis: DataAxis, data: DataParallel, precision: Precision, replicas: ReplicaGroups
    ) -> None:
        self._axis, self._data, self._precision, self._replicas = axis, data, precision, replicas
        _check_dense(rank.stages)
        if axis.unshards:
            _claim(rank.held)
        self.gathered, self.reduced = Gauge(), Gauge()
        self._mover = None if data.offload is None else Mover(open_store(OffloadTarget.parse(data.offload)))
        self._wide = with_statistics(rank.stages.values())
        self._units: list[Unit] = []
        self._by_stage: dict[int, list[Unit]] = {}
        self._hooks: dict[int, LayerHooks] = {}
        self._unbound: dict[int, SimpleNamespace] = {}  # by stage, an UNSHARD whose computation is not bound yet
        for stage in rank.stages:
            self._add_stage(stage, rank)
        main = {name: parameter for unit in self._units for name, parameter in unit.main.items()}
        super().__init__({name: main[name] for name in rank.held}, rank.stages.values())
        replicas.record(self.times)
        self.ranges = {name: span for unit in self._units for name, span in unit.ranges.items()}
        if precision.has_masters:
            cast_tables(self._modules, DTYPES[precision.dtype])
        self._users: dict[Unit, set[int]] = {unit: set() for unit in self._units}  # stages that hold it gathered
        gradients = {stage: [unit.gradients for unit in units] for stage, units in self._by_stage.items()}
        self._reductions = Reductions(gradients, axis, replicas.every, self._look, replicas.meet_in_backwards)
        shared = [unit.is_shared for unit in self._units if not unit.is_alone]
        self._reads_in_place, self.gathers_in_place = any(shared), bool(shared) and all(shared)
        self._updated: Wait = no_wait  # waits until all replicas have updated what this one reads in place
        self._runs = False  # whether a run has begun and is not finished
        self._open = self._reads = False  # whether reductions are due, and whether parameters may be read in place

    def _add_stage(self, stage: int, rank: RankModules) -> None:
        """Form the units of a stage. Parameters that an earlier stage of the rank holds too are in its units."""
        module, held, layers = rank.stages[stage], rank.held, rank.layers[stage]
        by_elements = self._data.layout == "elements"
        rule = BucketRule.of(self._axis.granularity, self._data.bucket_bytes, whole_parameters=not by_elements)
        uses = parameter_uses(module, layers, held, rank.homes, lambda p: p.numel() * self._formats(p).compute.itemsize)
        unit_of = {parameter: unit for unit in self._units for parameter in unit.parameters}
        # Per stage, and replicas: every rank that holds the stage lays it out alike.
        loads: dict[ReplicaGroup, list[int]] = {}
        for group in group_parameters(uses, rule):
            new = {name: p for name in (uses[position].name for position in group) if (p := held[name]) not in unit_of}
            if new:
                replicas = self._replicas.of(next(iter(new.values())))
                zeros, tied = [0] * replicas.degree, len(uses[group[0]].stages) > 1
                own = None if by_elements else zeros if tied else loads.setdefault(replicas, zeros)
                unit = self._made_unit(new, replicas, own)
                self._units.append(unit)
                unit_of.update(dict.fromkeys(new.values(), unit))
        used: dict[Unit, list[ParameterUse]] = {}
        for use in uses:
            used.setdefault(unit_of[held[use.name]], []).append(use)
        self._by_stage[stage] = list(used)
        if isinstance(module, StageModule) and self._axis.unshards:
            found = units_by_layer(list(used.values()), len(layers))
            self._hooks[stage] = module.observer = LayerHooks(list(used), found, self._axis)

    def _made_unit(
        self, parameters: Mapping[str, nn.Parameter], replicas: ReplicaGroup, loads: list[int] | None
    ) -> Unit:
        axis, formats = self._axis, self._formats(next(iter(parameters.values())))
        if replicas is not self._replicas.every:
            axis = expert_axis(axis, replicas.degree, offloads=self._mover is not None)
        layout = FlatLayout.of_unit([parameter.numel() for parameter in parameters.values()], axis, loads)
        return Unit(parameters, layout, formats, axis.strategy, replicas, self.gathered, self._mover)

    def _formats(self, parameter: nn.Parameter) -> NumberFormats:
        return NumberFormats.of(parameter.dtype, self._precision, keeps_dtype=parameter in self._wide)

    # One run

    def begin(self, program: Program) -> None:
        self._runs = True
        for unit in self._units:
            unit.take_replaced()
        if self._reads_in_place:
            self._updated = self._replicas.every.meet()
        for unit in self._units:
            unit.stale(self._updated)
        if not program.schedule.forward_only:
            self._reductions.begin()
        self._open, self._reads = not program.schedule.forward_only, self._reads_in_place
        self.gathered.restart()
        self.reduced.restart()

    def bind(self, action: Action, program: Program) -> Step:
        stage, op = action.stage, action.op
        if op is Op.UNSHARD:
            return self._bind_unshard(stage), None
        if op is Op.RESHARD:
            return (lambda: self._reshard(stage)), None
        return self._reductions.completion(action, program).flush, None

    def around(self, action: Action, step: Step, program: Program) -> Step:
        if action.op is not Op.W and self._axis.unshards:
            step = self._with_parameters(action, step)
        reduction = action.with_op(Op.REDUCE_GRAD)
        backward = action.op in (Op.B, Op.W) and self._replicas.every.degree > 1
        if not backward or reduction not in program.data_reductions:
            return step
        (run, ready), completion = step, self._reductions.completion(reduction, program)
        armed, hooks = completion.armed, self._hooks.get(action.stage)
        if action.op is Op.B and hooks is not None and hooks.gathers_inside:
            armed = partial(hooks.completing, completion)

        def last_backward() -> None:
            with armed():
                run()

        return last_backward, ready

    def _bind_unshard(self, stage: int) -> Callable[[], None]:
        """UNSHARD has no micro-batch: the next computation to be bound decides in which order units are gathered."""
        hooks = self._hooks.get(stage)
        this = self._unbound[stage] = SimpleNamespace(forward=True)  # whether a forward follows

        def unshard() -> None:
            for unit in self._by_stage[stage]:
                self._users[unit].add(stage)
            if hooks is not None:
                hooks.unshard(forward=this.forward)
            else:
                for unit in self._by_stage[stage]:
                    unit.prefetch()
                    if not unit.waits_for_reads:
                        unit.start_gather()

        return unshard

    def _with_parameters(self, action: Action, step: Step) -> Step:
        """A computation that first waits for the parameters that it reads."""
        (run, ready), units, hooks = step, self._by_stage[action.stage], self._hooks.get(action.stage)
        forward = action.op is Op.F
        if action.stage in self._unbound:
            self._unbound.pop(action.stage).forward = forward

        def computation() -> None:
            if hooks is not None:
                hooks.begin(forward=forward)
            else:
                for unit in units:
                    unit.wait()
            run()

        return computation, ready

    def _reshard(self, stage: int) -> None:
        for unit in self._by_stage[stage]:
            users = self._users[unit]
            users.discard(stage)
            if not users:
                unit.free()

    def finish(self) -> None:
        if not self._runs:  # sums over ranks have called it
            return
        self._runs = False
        if self._open:
            self._open = False
            self._reductions.finish(self.loss_scale)
            self._reads = False  # replicas have exchanged which gradients they have, after their last backward
        if self._reads:
            self._reads = False
            self._updated()
            self._replicas.every.meet()()
        self._replicas.end_run()

    def end(self) -> None:
        self._runs = self._open = self._reads = False
        self._reductions.drop()
        for unit in self._units:
            self._users[unit].clear()
            with suppress(RunError):  # of an unneeded gather: it would hide the error that ended the run
                unit.free()
            unit.forget()

    def close(self) -> None:
        for module in self._modules:
            if isinstance(module, StageModule):
                module.observer = None
        if not self._axis.strategy.shards_parameters:
            for parameter in (parameter for module in self._modules for parameter in module.parameters()):
                vars(parameter).pop(_HELD, None)
        if self._mover is not None:
            self._mover.stop()  # its store stays readable, for `units`

    # Values

    def _look(self, flat: Tensor | None) -> None:
        if self.records_peaks:
            self.reduced.set(self.held_bytes().gradients + (0 if flat is None else flat.nbytes))

    def unit_bytes(self) -> dict[int, list[tuple[int, int]]]:
        every = self._replicas.every.degree
        return {
            stage: [unit.sent_bytes(every) for unit in units if not unit.is_alone or every == 1]
            for stage, units in self._by_stage.items()
        }

    def held_bytes(self) -> HeldBytes:
        return HeldBytes.of(self._modules, self.parameters.values(), self._reductions.tensors())

    def peak_bytes(self) -> PeakBytes:
        return PeakBytes(self.gathered.peak, self.reduced.peak)

    @property
    def offloaded(self) -> Offloaded:
        if self._mover is None:
            return super().offloaded
        homes = (offloaded_parameter(parameter) for parameter in self.parameters.values())
        moved = self._mover.store.read_bytes + self._mover.store.written_bytes
        return Offloaded(sum(home.num_bytes for home in homes if home), moved, self._mover.wait_seconds)

    def value(self, name: str) -> Tensor:
        home = offloaded_parameter(self.parameters[name])
        return super().value(name) if home is None else home.live()

    def gradient_dtype(self, name: str) -> torch.dtype:
        return next(unit.gradient_dtype for unit in self._units if name in unit.main)

    def units(self) -> Iterator[Mapping[str, Tensor]]:
        return (unit.whole() for unit in self._units)

    @contextmanager
    def writable(self) -> Iterator[None]:
        for unit in self._units:
            unit.make_writable()
        try:
            yield
        finally:
            for unit in self._units:
                unit.free()
                unit.forget()

    def assign(self, values: Mapping[str, Tensor]) -> None:
        for unit in self._units:
            unit.assign(values)

    def refresh(self) -> None:
        if not self._axis.strategy.shards_parameters:
            for unit in self._units:
                unit.take_replaced()
                unit.stale()
                unit.start_gather()
            for unit in self._units:
                unit.wait()


def _claim(parameters: Mapping[str, nn.Parameter]) -> None:
    """Mark parameters as held by a store. Raises InputError where another store holds them."""
    for name, parameter in parameters.items():
        if _HELD in vars(parameter):
            raise InputError(
                f"parameter {name!r} is held by another Pipeline, which shards it or keeps a master of it. Build a "
                "new model for this Pipeline, and load the other's state_dict()."
            )
    for parameter in parameters.values():
        setattr(parameter, _HELD, True)


def _check_dense(stages: Mapping[int, nn.Module]) -> None:
    """Raises InputError where a layer produces sparse gradients."""
    for name, module in (pair for stage in stages.values() for pair in stage.named_modules()):
        if getattr(module, "sparse", False) is True and next(module.parameters(False), None) is not None:
            raise InputError(
                f"module {name!r} ({type(module).__name__}) produces sparse gradients, which data parallelism does "
                "not support. Use sparse=False."
            )
