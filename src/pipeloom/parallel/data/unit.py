"""`Unit`: parameters that are gathered, freed and reduced together, such as those of one layer or of several.

    module parameters      full, in the format of forwards; zero3 frees them between uses (`FullParameters`)
    main parameters        this replica's shards, in the format of updates (`pipeloom.parallel.offload.main_parameters`)
    gradients              see `unit_gradients`

Main parameters share memory with the module's where both have one format and nothing is freed. Under ddp without
masters they are the module's parameters. Where they have memory of their own, they may be offloaded: a gather then
reads this replica's segment from the offload target, before the collective.

Under zero3 without masters and offload, replicas of one host share the memory of full parameters. Each one's main
parameters are a segment of it, so a gather copies nothing: it waits until all replicas have updated their segments.
Replicas meet at the begin of a run for that, and at its end, before one of them updates what another may still read.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

from pipeloom.engine.overlap_times import Wait, no_wait
from pipeloom.engine.stores.held_bytes import Gauge
from pipeloom.engine.stores.parameter_range import Range
from pipeloom.ir import DataStrategy
from pipeloom.parallel.data.full_parameters import FullParameters
from pipeloom.parallel.data.replica_group import ReplicaGroup
from pipeloom.parallel.data.unit_gradients import UnitGradients
from pipeloom.parallel.data.unit_layout import FlatLayout, own_segment
from pipeloom.parallel.mixed_precision import NumberFormats
from pipeloom.parallel.offload.main_parameters import OffloadedShard, offloaded_parameter
from pipeloom.parallel.offload.mover import Mover


class Unit:
    """Parameters of one number format on one device.

    Args:
        parameters: of the module, by canonical name.
        layout: of the parameters in flat memory.
        formats: number formats.
        strategy: decides what each replica keeps.
        replicas: the processes that share the parameters. Replica 0 broadcasts its values.
        gathered: counts gathered bytes that will be freed.
        mover: to the offload target of main parameters; None: no offload.

    Attributes:
        main: main parameters by name.
        ranges: of main parameters that do not have the parameter's shape.
        filled: whether module parameters have the current values.
        gradients: of the parameters.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        layout: FlatLayout,
        formats: NumberFormats,
        strategy: DataStrategy,
        replicas: ReplicaGroup,
        gathered: Gauge,
        mover: Mover | None = None,
    ) -> None:
        self._gathered, self._mover = gathered, mover
        self.parameters = list(parameters.values())
        self._names = list(parameters)
        self._layout, self._formats, self._replicas, self._strategy = layout, formats, replicas, strategy
        self._segment = own_segment(strategy, replicas.index)
        self.main: dict[str, nn.Parameter] = dict(parameters)
        self.ranges: dict[str, Range] = {}
        self._shapes = [parameter.shape for parameter in self.parameters]
        self._full: FullParameters | None = None
        self._places: list[Tensor] = []  # of main parameters, in this replica's segment
        self._gathering: Wait | None = None
        self._shard: OffloadedShard | None = None
        self._updated: Wait = no_wait
        self.filled = False
        self._take_over()
        self.gradients = UnitGradients(self.parameters, self.main, layout, formats.gradient, strategy, replicas)

    # Memory

    @torch.no_grad()
    def _take_over(self) -> None:
        """Move the parameters into flat memory, and make the main parameters."""
        flat = self.parameters[0].new_zeros(self._layout.num_elements)
        views = self._layout.views(flat, self._shapes)
        for view, parameter in zip(views, self.parameters, strict=True):
            view.copy_(parameter)
        self._replicas.broadcast(flat)()
        formats, frees = self._formats, self._strategy.shards_parameters
        if not self._strategy.shards_optimizer and formats.compute == formats.main:
            for view, parameter in zip(views, self.parameters, strict=True):
                parameter.copy_(view)
            return
        own = self._own_segment(flat)
        apart, shared = formats.compute != formats.main or frees, None
        if frees and formats.compute == formats.main and self._mover is None:
            shared = self._replicas.flat(flat.numel(), flat.dtype, flat.device)
        if shared is not None:
            segment = shared.segment(self._layout.segment(self._replicas.index))
            flat, own = shared.values, segment.copy_(own)
        elif apart:
            own = own.to(formats.main, copy=True)
        full = flat.to(formats.compute)
        self._full = FullParameters(self.parameters, self._layout, full, frees, self._gathered, shared)
        shards, keeps_whole = self._layout.shards(own, self._segment), self._layout.keeps_whole
        for index, (name, shard) in enumerate(zip(self._names, shards, strict=True)):
            module_parameter, shape = self.parameters[index], self._shapes[index]
            start, stop = self._layout.shard(index, self._segment)
            if keeps_whole and stop - start == shape.numel():
                shard = shard.view(shape)
            else:
                self.ranges[name] = Range(start, stop, tuple(shape))
            self._places.append(shard)
            main = nn.Parameter(shard, requires_grad=module_parameter.requires_grad)
            vars(main).update(vars(module_parameter))  # attributes that users set, such as "no weight decay"
            if module_parameter.is_floating_point():
                module_parameter.grad_dtype = formats.gradient
                if formats.gradient != formats.main:
                    main.grad_dtype = None  # any: updates widen them, see `pipeloom.training.optimizer_step`
            self.main[name] = main
        if apart and self._mover is not None:  # also where this replica has no element
            self._shard = OffloadedShard(own, self.main.values(), self._mover, formats.compute, self._gathered)
        else:
            self._own = own
        self.free()
        self.forget()

    def _own_segment(self, flat: Tensor) -> Tensor:
        """This replica's segment of flat memory."""
        return flat[:0] if self._segment is None else flat[self._layout.segment(self._segment)]

    # Gathering

    def start_gather(self) -> None:
        """Start to copy or all-gather main parameters into module parameters, without waiting."""
        if self.filled or self._gathering is not None:
            return
        if self._full is None:
            self.filled = True
            return
        self._full.allocate()
        if self.is_shared:
            self._gathering = self._replicas.read_in_place(self._updated)
            return
        own = self._own_segment(self._full.flat)
        arrive = no_wait
        if self._segment is not None:
            if self._shard is not None:
                arrive = partial(self._wait_for_read, self._shard.fill(own))
            elif own.data_ptr() != self._own.data_ptr():
                own.copy_(self._own)
        if self._collects:
            arrive()
            arrive = self._replicas.gather_full(self._strategy, self._full.flat, own)
        self._gathering = arrive

    def _wait_for_read(self, arrive: Wait) -> None:
        with self._replicas.times.waiting():
            arrive()

    @property
    def _collects(self) -> bool:
        """Whether a gather is a collective."""
        return self._replicas.degree > 1 and self._strategy.shards_optimizer

    @property
    def waits_for_reads(self) -> bool:
        """Whether `start_gather` waits for a read, which `prefetch` begins."""
        return self._shard is not None and self._collects

    def prefetch(self) -> None:
        """Start the read that a gather has to wait for, without waiting."""
        if self.waits_for_reads and not self.filled and self._gathering is None:
            assert self._full is not None
            assert self._shard is not None
            there = self._full.is_there and self._segment is not None
            self._shard.prefetch(self._own_segment(self._full.flat) if there else None)

    def wait(self) -> None:
        """Wait until module parameters have their values."""
        if self.filled:
            return
        self.start_gather()
        if self._gathering is not None:
            self._gathering()
            self._gathering = None
            assert self._full is not None
            self._full.show()
            self.filled = True

    def make_writable(self) -> None:
        """Allow writes into module parameters until they are freed."""
        if self._full is not None:
            self._full.allocate()
            self._full.show()

    def free(self) -> None:
        """Free gathered parameters (zero3), after a gather in flight."""
        if self._full is None or not self._full.frees:
            return
        gathering, self._gathering = self._gathering, None
        if self._shard is not None:
            self._shard.drop()
        try:
            if gathering is not None:
                gathering()
        finally:
            self._full.free()
            self.filled = False

    @property
    def is_shared(self) -> bool:
        """Whether replicas share the memory of full parameters."""
        return self._full is not None and self._full.shared is not None

    def forget(self) -> None:
        """Between runs: free module parameters that replicas share, and drop what this process wrote into them."""
        if self._full is not None:
            self._full.forget()

    def stale(self, updated: Wait = no_wait) -> None:
        """Main parameters may have changed; `updated` waits until those of all replicas have their values."""
        self.filled, self._updated = False, updated
        if self._shard is not None:
            self._shard.drop()

    @torch.no_grad()
    def take_replaced(self) -> None:
        """Copy main parameters that have other memory, since the user has set their `data`, to their places."""
        if self._full is None or self._shard is not None:
            return
        for main, place in zip(self.main.values(), self._places, strict=True):
            if main.data_ptr() != place.data_ptr():
                place.copy_(main)
                main.data = place

    @property
    def is_alone(self) -> bool:
        """Whether no other replica has these parameters."""
        return self._replicas.degree == 1

    def sent_bytes(self, replicas: int) -> tuple[int, int]:
        """Bytes of the full parameters when they are gathered, and of their gradients when they are reduced.

        Of experts, which fewer replicas share: the bytes whose collectives between all `replicas` send as much.
        """
        elements, formats, degree = self._layout.num_elements, self._formats, self._replicas.degree
        if degree < replicas:
            own, every = degree - 1, replicas - 1
            elements = round(elements * own / every * (1 if self._strategy.has_server else replicas / degree))
        return elements * formats.compute.itemsize, elements * formats.gradient.itemsize

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype of main gradients."""
        return self._formats.gradient

    # Values

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Values of full parameters in the format of updates, in new memory; every replica calls it."""
        if self._full is None:
            return {}
        self.take_replaced()
        flat = self._full.flat.new_empty(self._layout.num_elements, dtype=self._formats.main)
        own = self._own_segment(flat)
        if self._shard is None:
            own.copy_(self._own)
        else:
            self._shard.copy_to(own)
        self._replicas.gather_full(self._strategy, flat, own)()
        return dict(zip(self._names, self._layout.views(flat, self._shapes), strict=True))

    @torch.no_grad()
    def assign(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of full parameters into the main ones."""
        if self._full is None:
            return
        for index, (name, main) in enumerate(self.main.items()):
            start, stop = self._layout.shard(index, self._segment)
            value, offloaded = values[name].reshape(-1)[start:stop].view(main.shape), offloaded_parameter(main)
            main.copy_(value) if offloaded is None else offloaded.write(value)
