"""`AroundLayers`: the modules of a model around its layers, as they were when it was cut."""

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

from torch import nn

from pipeloom.errors import SplitError
from pipeloom.split.planned.collected import collecting_hooks

STANDS_FOR = "stands_for"  # attribute of a forward that replaces another one while a model is cut


def set_forward(module: nn.Module) -> Any:
    """The forward that was set on a module, or None."""
    own = vars(module).get("forward")
    return getattr(own, STANDS_FOR, own)


class AroundLayers:
    """The modules around a model's layers: stages run their forwards as they were when the model was cut.

    Args:
        model: the uncut model; it may be freed.
        stages: the modules of all its stages.
        keeps_hooks: whether the stages run the forward hooks that these modules have at the time of a forward.
        runs_backward_hooks: whether their backward hooks run, or ran while the model was traced.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Iterable[nn.Module],
        *,
        keeps_hooks: bool,
        runs_backward_hooks: bool = True,
    ) -> None:
        parts = list(stages)
        inside = {id(part) for stage in parts for part in stage.modules()}
        around = [(name, module) for name, module in model.named_modules() if id(module) not in inside]
        self._model = type(model).__name__
        self._without_backward_hooks = (
            [] if runs_backward_hooks else [(name, weakref.ref(part)) for name, part in around]
        )
        self._seen = [(name, weakref.ref(module), keeps_hooks, _found(module, keeps_hooks)) for name, module in around]
        self._chances = list(_layer_drops(around))
        configs = [vars(module).get("config") for _, module in around] if len(parts) > 1 else []
        self._rescaled = next((config for config in configs if hasattr(config, "rescale_every")), None)

    @classmethod
    def nothing(cls) -> Self:
        """Those of a model that is given in parts."""
        return cls(nn.Module(), (), keeps_hooks=True)

    def check(self, *, training: bool) -> None:
        """Raise SplitError where stages would not run what the model's forward does now.

        Args:
            training: whether the stages are in training mode, where a model may drop layers.
        """
        for name, part_of in self._without_backward_hooks:
            part = part_of()
            if part is not None and (part._backward_hooks or part._backward_pre_hooks):
                raise SplitError(
                    f"{self._named(name)} has backward hooks, and no stage runs the whole module: gradients would be "
                    "others. Register them on its layers, or remove them."
                )
        for name, module_of, keeps_hooks, before in self._seen:
            module = module_of()
            now = None if module is None else _found(module, keeps_hooks)
            if now is not None and now != before:
                changes = zip(("another forward", "other forward hooks", "other modules"), now, before, strict=True)
                what = next(f"has {what}" for what, one, other in changes if one != other)
                raise SplitError(
                    f"{self._named(name)} {what} than when the model was cut, and stages run the earlier ones. "
                    "Change them before the Pipeline is made, or make another Pipeline."
                )
        every = 0 if training else getattr(self._rescaled, "rescale_every", 0)
        if every > 0:
            raise SplitError(
                f"config.rescale_every={every}: {self._model} divides weights of all its layers in place to evaluate, "
                "and a stage has its own alone. Set it to 0 before the first forward."
            )
        for holder_of, name, where in self._chances if training else ():
            chance = getattr(holder_of(), name, None)
            if isinstance(chance, int | float) and chance > 0:
                raise SplitError(
                    f"{where}={chance}: {self._model} drops whole layers at random, and every stage runs each of its "
                    "layers once. Set it to 0 before training."
                )

    def _named(self, name: str) -> str:
        return f"module {name!r} of {self._model}" if name else self._model

    def add_copied(self, modules: Iterable[tuple[str, nn.Module, bool]]) -> None:
        """Watch modules of which a stage runs a copy: name, module, and whether the copy runs its hooks of the time."""
        self._seen += [(name, weakref.ref(module), keeps, _found(module, keeps)) for name, module, keeps in modules]


def _found(module: nn.Module, keeps_hooks: bool) -> tuple[int, int, tuple[tuple[str, int], ...]]:
    """What identifies a forward that is set on a module, the number of its own forward hooks, and its modules."""
    own = set_forward(module)
    hooks = 0 if keeps_hooks else len(module._forward_hooks) + len(module._forward_pre_hooks)
    hooks -= 0 if keeps_hooks else len(collecting_hooks(module))
    return (0 if own is None else id(own), hooks, tuple((name, id(part)) for name, part in module._modules.items()))


def _layer_drops(around: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[Callable[[], Any], str, str]]:
    """Attributes of modules and their configurations with the probability that a layer is dropped, as in transformers.

    Where both have it, the module's goes before.

    Returns:
        What returns the module or configuration, or None once it is freed; the attribute; its name for messages.
    """
    configs: dict[int, Any] = {}
    own: set[str] = set()
    for home, module in around:
        for name in vars(module):
            if name.endswith("layerdrop"):
                own.add(name)
                yield weakref.ref(module), name, f"{home}.{name}" if home else name
        config = vars(module).get("config")
        if hasattr(config, "__dict__"):
            configs[id(config)] = config
    for config in configs.values():
        for name in vars(config):
            if name.endswith("layerdrop") and name.removeprefix("encoder_").removeprefix("decoder_") not in own:
                yield partial(_same, config), name, f"config.{name}"


def _same(value: Any) -> Any:
    return value
