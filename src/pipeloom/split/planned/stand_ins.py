"""What stands in the module tree that a stage's forward walks: calls to the stage's own parts, and to passed-over ones.

`OwnPart` looks its module up in the stage, so that a replaced layer takes effect. `PassedOver` stands for a module of
another stage: it has the attributes of the module, and none of its memory. `InsidePart` stands for a module inside of
one of these.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn

from pipeloom.split.planned.attributes import bound_to
from pipeloom.split.planned.collected import collecting_hooks
from pipeloom.split.planned.containers import UNCHANGED
from pipeloom.split.planned.forward.other_modules import check_set, run_other
from pipeloom.split.planned.module_copies import without_memory

_ABSENT = object()


class StandIn(nn.Module, ABC):
    """Stands for a module in the tree that a stage's forward walks: of its class for `isinstance`, with its attributes.

    Modules inside of it stand in for themselves, and methods run on the stand-in, so that all tensors that the forward
    reads are those of the stage that has them.
    """

    def __init__(self, link: tuple[Any, ...]) -> None:
        super().__init__()
        vars(self)["_link"] = link  # in a tuple: neither stage nor module is a submodule

    @abstractmethod
    def _original(self) -> nn.Module:
        """The module, of this stage, or without memory."""

    def _stage(self) -> Any:
        """The stage whose forward meets it."""
        return vars(self)["_link"][0]

    @abstractmethod
    def _read_value(self, name: str, value: Any) -> Any:
        """What the forward gets of an attribute of the module, or of one inside of it, that may be absent here."""

    @abstractmethod
    def _call_inside(self, name: str, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Call a module inside of this one."""

    @abstractmethod
    def _is_shared(self) -> bool:
        """Whether no forward runs, or every stage has the module: it is read directly."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._original()) if "_link" in vars(self) else type(self)

    @abstractmethod
    def _set_inside(self, name: str, home: nn.Module, key: str, value: Any) -> None:
        """Set the attribute `key` of `home`, which is the module or inside of it; `name` is that in this module."""

    def __setattr__(self, name: str, value: Any) -> None:
        if "_link" not in vars(self) or self._stage().current_run is None:
            super().__setattr__(name, value)
        else:
            self._set_inside(name, self._original(), name, value)

    def __getattr__(self, name: str) -> Any:
        if "_link" not in vars(self):
            raise AttributeError(name)
        module = self._original()
        if self._is_shared():
            return getattr(module, name)
        value = getattr(module, name, _ABSENT)
        if isinstance(value, nn.Module) and value is module._modules.get(name):
            return InsidePart((self, name, value))
        if isinstance(value, MethodType):
            return bound_to(self, value, module)
        value = self._read_value(name, value)
        if value is _ABSENT:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
        return value

    def __getitem__(self, key: Any) -> Any:
        module: Any = self._original()
        if not hasattr(type(module), "__getitem__"):
            raise TypeError(f"{type(module).__name__!r} object is not subscriptable")
        found = module[key]
        name = next((name for name, each in module._modules.items() if each is found), None)
        return found if name is None else getattr(self, name)

    def __len__(self) -> int:
        module: Any = self._original()
        return len(module)

    def __bool__(self) -> bool:
        return bool(self._original())

    def named_parameters(self, *args: Any, **settings: Any) -> Iterator[tuple[str, Any]]:
        """Those of the module, by their names in it."""
        for name, value in self._original().named_parameters(*args, **settings):
            yield name, value if self._is_shared() else self._read_value(name, value)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside of the module."""
        for name, _ in self._original().named_children():
            yield name, getattr(self, name)

    def named_modules(self, *args: Any, **settings: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module and all inside of it; where a container lists what the stage has, its own."""
        listed = self._listed()
        if listed is not None:
            yield from listed.named_modules(*args, **settings)
            return
        prefix = settings.get("prefix", args[1] if len(args) > 1 else "")
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(prefix=f"{prefix}.{name}" if prefix else name)

    def _listed(self) -> nn.Module | None:
        """What a container lists in place of this; None: this and the modules inside of it."""
        return None


class OwnPart(StandIn):
    """Stands where a model calls a module that its stage has.

    Args:
        stage: its `current_run` runs the module; without one, the module runs alone. In a copy of the stage, the
            copy.
        part: index of the part in the stage, or the name of another module.
        home, key: the dictionary with the module, and its key there.
    """

    def __init__(self, stage: nn.Module, part: int | str, home: dict[str, nn.Module | None], key: str) -> None:
        super().__init__((stage, part, home, key))
        self._modules["part"] = home[key]

    def __call__(self, *args: Any, **settings: Any) -> Any:  # hooks are those of the module
        stage, part, home, key = self._link
        run: Any = stage.current_run
        module: Any = home[key]
        if run is None:
            return module(*args, **settings)
        if isinstance(part, str):
            return run_other(run, part, module, args, settings)
        done = run.done
        if part not in run.plain or (done and part <= done[-1]):
            return run.run_part(part, module, args, settings)
        if not (UNCHANGED.issuperset(map(type, args)) and UNCHANGED.issuperset(map(type, settings.values()))):
            return run.run_part(part, module, args, settings)
        # Almost all parts of almost all forwards: nothing arrives for them, and nothing of them is sent.
        run.thread["layer"] = module
        result = module(*args, **settings)
        done.append(part)
        return result

    forward = __call__

    def _original(self) -> nn.Module:
        """The module, as it is now."""
        _, _, home, key = vars(self)["_link"]
        module: nn.Module = home[key]
        return module

    def _read_value(self, name: str, value: Any) -> Any:
        """The value, which other stages may read too."""
        stage, part, _, _ = vars(self)["_link"]
        return stage.read(part, name, value)

    def _call_inside(self, name: str, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Run a module inside of this one, whose result other stages may read."""
        stage, part, _, _ = vars(self)["_link"]
        return stage.run_inside(part, name, module, args, settings)

    def _is_shared(self) -> bool:
        """Whether no forward runs, or every stage has the module."""
        stage, part, _, _ = vars(self)["_link"]
        return stage.current_run is None or bool(stage.is_everywhere(part))

    def _listed(self) -> nn.Module | None:
        """The module where a container lists what the stage has."""
        return self._original() if self._stage().lists_own or self._is_shared() else None

    def _set_inside(self, name: str, home: nn.Module, key: str, value: Any) -> None:
        """Set it on the module, which reads it."""
        stage, part, _, _ = vars(self)["_link"]
        if not stage.is_everywhere(part):
            outer = part if isinstance(part, str) else stage.names[part]
            if isinstance(value, StandIn):
                raise stage.current_run.place.reads_given_module(outer, f"{outer}.{name}")
            check_set(stage.current_run, f"{outer}.{name}", home, key, value)
        setattr(home, key, value)


class PassedOver(StandIn):
    """Stands where a model calls a module of another stage.

    Args:
        stage: calls ``stage.pass_over(place, name, twin, args, settings)``, with a `twin` of the module without memory.
        place: of the part in the model; None: the module is no part.
        name: fully qualified.
        module: the module. Of its hooks, those remain that collect outputs: a model may index what they collect.
    """

    def __init__(self, stage: nn.Module, place: int | None, name: str, module: nn.Module) -> None:
        # Hooks and parameters of the module are not here.
        super().__init__((stage, place, name, without_memory(module), collecting_hooks(module)))

    def __call__(self, *args: Any, **settings: Any) -> Any:
        stage, place, name, twin, hooks = vars(self)["_link"]
        result = stage.pass_over(place, name, twin, args, settings)
        if not stage.collects(name):
            for hook in hooks:
                hook(self, args, result)
        return result

    forward = __call__

    def _original(self) -> nn.Module:
        """The module without memory."""
        module: nn.Module = vars(self)["_link"][3]
        return module

    def _read_value(self, name: str, value: Any) -> Any:
        """What the other stage sends, or zeros."""
        stage, _, own, _, _ = vars(self)["_link"]
        return stage.read_absent(f"{own}.{name}", value)

    def _call_inside(self, name: str, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a module inside of this one returns on its stage, or zeros."""
        stage, _, own, _, _ = vars(self)["_link"]
        return stage.pass_over(None, f"{own}.{name}", module, args, settings)

    def _is_shared(self) -> bool:
        """Whether no forward runs."""
        return self._stage().current_run is None

    def _listed(self) -> nn.Module | None:
        """An empty module where a container lists what the stage has."""
        stage = self._stage()
        return nn.Module() if stage.lists_own or stage.current_run is None else None

    def _set_inside(self, name: str, home: nn.Module, key: str, value: Any) -> None:
        """Set it on the module without memory."""
        stage, _, own, _, _ = vars(self)["_link"]
        check_set(stage.current_run, f"{own}.{name}", home, key, None)
        vars(home)[key] = value


class InsidePart(StandIn):
    """Stands for a module inside of one that a stage passes over or runs as a whole.

    Args:
        link: the stand-in of the module around it, its name there, and the module.
    """

    def __call__(self, *args: Any, **settings: Any) -> Any:
        outer, name, module = vars(self)["_link"]
        return outer._call_inside(name, module, args, settings)

    forward = __call__

    def _stage(self) -> Any:
        """The stage whose forward meets it."""
        return vars(self)["_link"][0]._stage()

    def _original(self) -> nn.Module:
        """The module."""
        module: nn.Module = vars(self)["_link"][2]
        return module

    def _read_value(self, name: str, value: Any) -> Any:
        """As for the module around it."""
        outer, own, _ = vars(self)["_link"]
        return outer._read_value(f"{own}.{name}", value)

    def _call_inside(self, name: str, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """As for the module around it."""
        outer, own, _ = vars(self)["_link"]
        return outer._call_inside(f"{own}.{name}", module, args, settings)

    def _is_shared(self) -> bool:
        """As the module around it."""
        return bool(vars(self)["_link"][0]._is_shared())

    def _set_inside(self, name: str, home: nn.Module, key: str, value: Any) -> None:
        """As for the module around it."""
        outer, own, _ = vars(self)["_link"]
        outer._set_inside(f"{own}.{name}", home, key, value)
