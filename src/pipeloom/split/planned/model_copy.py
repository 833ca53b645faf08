"""`ModelCopy`: the shallow copy of a model's containers, inside which the forward of a stage runs."""

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial, reduce
from itertools import islice
from typing import Any, Self

from torch import nn

from pipeloom.split.planned.attributes import ContainerAttributes
from pipeloom.split.planned.collected import INSTALLED, HooksOnDemand
from pipeloom.split.planned.module_copies import shallow_copy
from pipeloom.split.planned.place import StagePlace
from pipeloom.split.planned.stand_ins import OwnPart, PassedOver

_LISTINGS = ("named_parameters", "named_modules", "state_dict")


class _Reading(threading.local):
    """Whether modules may be listed in the forwards of this thread."""

    modules = False


_reading = _Reading()


@contextmanager
def modules_may_be_read() -> Iterator[None]:
    """Inside the block, forwards may list their modules: for code around a model that looks for some kinds of them."""
    before, _reading.modules = _reading.modules, True
    try:
        yield
    finally:
        _reading.modules = before


class ModelCopy:
    """A model's containers, copied, with an `OwnPart` or `PassedOver` in place of each part.

    Args:
        stage: the `PlannedStage` that runs the copy, and holds the modules that are no parts.
        place: of the stage.
        model: the whole model.

    Attributes:
        model: the copy, of the model's class.
        attributes: of the copied modules.
        lists_own: while the parameters or modules that the stage has are listed.
    """

    def __init__(self, stage: Any, place: StagePlace, model: nn.Module) -> None:
        self._stage, self._place = stage, place
        self._containers: list[nn.Module] = []
        self.lists_own = False
        self.attributes = ContainerAttributes()
        self.model = self._copy(model, "")
        on_demand = HooksOnDemand(model, [*stage.modules(), *self._containers])
        for container in self._containers:
            if INSTALLED in vars(container):
                vars(container)[INSTALLED] = on_demand

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy whose containers have the same hooks: also those that are set on the model later."""
        for container in self._containers:
            hooks = (vars(container)[name] for name in vars(container) if "_hooks" in name)
            memo.update({id(each): each for each in hooks if isinstance(each, dict)})
        made = object.__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def train(self, training: bool) -> None:
        """Set the mode of the containers: training or evaluation."""
        for container in self._containers:
            container.training = training

    def buffers(self) -> set[int]:
        """The identities of the containers' own buffers."""
        return {id(buffer) for container in self._containers for buffer in container._buffers.values()}

    def _copy(self, module: nn.Module, name: str) -> nn.Module:
        places, names = self._place.places, self._place.names
        if name in names:
            own: nn.Module = self._stage.own_part(names.index(name))
            return own
        if name in places:
            return PassedOver(self._stage, places[name], name, module)
        prefix = f"{name}." if name else ""
        holds_parts = any(part.startswith(prefix) for part in places)
        if not holds_parts and type(module).forward is not nn.Module.forward:
            return self._no_part(module, name)
        container = shallow_copy(module)
        for method in _LISTINGS:
            vars(container)[method] = partial(self._list, container, prefix, method)
        vars(container)["get_parameter"] = vars(container)["get_buffer"] = partial(_attribute_of, container)
        self._containers.append(container)
        self.attributes.follow(module, container)
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            home = self._stage.namespace(name)
            home._parameters, home._buffers = dict(module._parameters), dict(module._buffers)
            home._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
            container._parameters, container._buffers = home._parameters, home._buffers
        for key, child in module._modules.items():
            container._modules[key] = None if child is None else self._copy(child, prefix + key)
        return container

    def _no_part(self, module: nn.Module, name: str) -> nn.Module:
        """A module that is no part: in front of the blocks or behind them, or without parameters."""
        if next(module.parameters(), None) is None:
            twin = copy.deepcopy(module)
            for pair in zip(module.modules(), twin.modules(), strict=True):
                self.attributes.follow(*pair)
            return OwnPart(self._stage, name, *self._stage.place(name, twin))
        if self._place.keeps_others or name in self._place.everywhere:
            self._stage.others_with_parameters.add(name)
            return OwnPart(self._stage, name, *self._stage.place(name, module))
        return PassedOver(self._stage, None, name, module)

    def _list(self, container: nn.Module, prefix: str, method: str, /, *args: Any, **settings: Any) -> Any:
        """What a container's parameters or modules are, read in a forward, where the stage has all of them."""
        own = getattr(type(container), method)
        if self._stage.current_run is None or self.lists_own:
            return own(container, *args, **settings)
        has_all = not any(part.startswith(prefix) for part in self._place.elsewhere)
        looks = _reading.modules and method != "named_parameters"
        if not (has_all or looks) and method != "named_parameters":
            raise self._place.reads_all(method)
        self.lists_own = True
        try:
            found = own(container, *args, **settings)
            found = found if method == "state_dict" else list(found)
        finally:
            self.lists_own = False
        return found if has_all or looks else self._first_parameters(container, found)

    def _first_parameters(self, container: nn.Module, found: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The parameters of this stage, or one of another, then an error: a forward may ask the first for its dtype."""
        if found:
            yield from found
        else:
            elsewhere = (named for part in _passed_over(container) for named in part.named_parameters())
            yield from islice(elsewhere, 1)
        raise self._place.reads_all("named_parameters")


def _attribute_of(container: nn.Module, target: str) -> Any:
    """A parameter or buffer by its name, as the forward gets it."""
    return reduce(getattr, target.split("."), container)


def _passed_over(module: nn.Module) -> Iterator[PassedOver]:
    """The stand-ins of modules of other stages inside of a container."""
    if type(module) is PassedOver:
        yield module
    elif type(module) is not OwnPart:
        for child in module._modules.values():
            yield from () if child is None else _passed_over(child)
