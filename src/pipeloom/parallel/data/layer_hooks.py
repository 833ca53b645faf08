"""`LayerHooks`: runs the unit actions of a computation between its layers (see `pipeloom.ir.unit_actions`).

In a forward, the stage calls these hooks before and after each layer. In B and I, hooks on the layers' outputs call
them: autograd runs in reverse order, so when it computes the gradient of a layer's output, the layers behind it are
done. W reads no parameters.

All replicas must start their collectives in the same order, also where some parameters get no gradient from their
samples. Where a backward also gathers units, these hooks therefore start its reductions, not the arrival of gradients.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeloom.ir import DataAxis, Op
from pipeloom.ir.unit_actions import UnitAction, gathers_inside, unit_actions
from pipeloom.parallel.data.buckets import ParameterUse
from pipeloom.parallel.data.reductions import Completion
from pipeloom.parallel.data.unit import Unit
from pipeloom.parallel.mixed_precision import with_statistics
from pipeloom.parallel.placed import is_expert


class LayerHooks:
    """Has every layer of a stage wait for its units. A `pipeloom.split.stage_module.LayerObserver`.

    `layers` has the numbers of the units that each layer reads.

    Attributes:
        gathers_inside: whether computations gather and free units themselves (granularity microbatch).
        outside: the units that no layer reads.
    """

    def __init__(self, units: Sequence[Unit], layers: Sequence[Sequence[int]], data: DataAxis) -> None:
        offloaded = [number for number, unit in enumerate(units) if unit.waits_for_reads]
        self._units, self._layers = units, [[units[number] for number in layer] for layer in layers]
        self._actions = {
            forward: unit_actions(layers, len(units), data, forward=forward, offloaded=offloaded)
            for forward in (True, False)
        }
        self.gathers_inside = gathers_inside(data)
        # Parameters that replicas share stay readable: their layers need no hook where nothing is to be done.
        at_layer, in_place = self._actions[False].at_layer, all(unit.is_shared for unit in units)
        self._announced = [bool(actions) or not in_place for actions in at_layer]
        read = {number for layer in layers for number in layer}
        self.outside = [unit for number, unit in enumerate(units) if number not in read]
        self._forward = False
        self._current = len(layers)  # the layer whose backward runs
        self._kept: set[Unit] = set()  # units of layers whose backward no hook announces
        self._completion: Completion | None = None  # of the backward that runs

    def unshard(self, *, forward: bool) -> None:
        """The UNSHARD in front of a computation."""
        self._run(self._actions[forward].unshard)

    def begin(self, *, forward: bool) -> None:
        """Called when a computation of the stage begins."""
        self._forward, self._current = forward, len(self._layers)
        for unit in self.outside:
            unit.wait()
        if not forward:
            for layer in self._layers:
                for unit in layer:
                    if not self.gathers_inside or unit in self._kept:
                        unit.wait()

    @contextmanager
    def completing(self, completion: Completion) -> Iterator[None]:
        """Around the last backward that a REDUCE_GRAD covers: finished layers start its reductions."""
        self._completion = completion
        completion.begin()
        try:
            yield
        finally:
            self._completion = None

    def before(self, index: int) -> None:
        """A layer begins its forward, possibly in a recomputation."""
        for unit in self._layers[index]:
            if not unit.filled:
                unit.wait()
        if self._forward:
            self._run(self._actions[True].at_layer[index])

    def after(self, index: int, value: Any) -> None:
        """A layer has returned `value`."""
        if not (self.gathers_inside and self._forward):
            return
        if index == len(self._layers) - 1:
            self._run(self._actions[True].end)
        if self._announced[index] and torch.is_grad_enabled():
            leaves = (value,) if isinstance(value, Tensor) else tree_leaves(value)
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            for output in outputs:
                output.register_hook(partial(self._enter, index))  # type: ignore[no-untyped-call]
            if not outputs:
                self._kept.update(self._layers[index])

    def _enter(self, index: int, gradient: Tensor) -> None:
        """Called when the backward of a layer begins. Skipped layers, such as dropped ones, count as done."""
        while self._current > index:
            self._current -= 1
            for unit in self._layers[self._current]:
                unit.wait()
            self._run(self._actions[False].at_layer[self._current])

    def _run(self, actions: Iterable[UnitAction]) -> None:
        for op, number in actions:
            unit = self._units[number]
            if op is Op.UNSHARD:
                unit.start_gather()
            elif op is Op.RELOAD:
                unit.prefetch()
            elif op is Op.RESHARD:
                if self._forward or unit not in self._kept:
                    unit.free()
            elif self._completion is not None:
                self._completion.reach(unit.gradients)


def parameter_uses(
    module: nn.Module,
    layers: Sequence[str],
    held: Mapping[str, nn.Parameter],
    homes: Mapping[str, tuple[int, ...]],
    num_bytes: Callable[[nn.Parameter], int],
) -> list[ParameterUse]:
    """The parameters of a stage in its order, as `pipeloom.parallel.data.buckets` groups them.

    Args:
        module: the stage.
        layers: names of its layers.
        held: parameters by canonical name.
        homes: by the same names, all stages with the parameter.
        num_bytes: bytes of a parameter in the format of forwards.
    """
    names = {parameter: name for name, parameter in held.items()}
    wide = with_statistics([module])
    users: dict[nn.Parameter, list[int]] = {}
    for index, name in enumerate(layers):
        for parameter in module.get_submodule(name).parameters() if name else ():
            users.setdefault(parameter, []).append(index)
    return [
        ParameterUse(
            names[parameter],
            num_bytes(parameter),
            tuple(users.get(parameter, (-1,))),
            homes[names[parameter]],
            (parameter.dtype, parameter.device, parameter.requires_grad, parameter in wide, is_expert(parameter)),
        )
        for parameter in module.parameters()
    ]
