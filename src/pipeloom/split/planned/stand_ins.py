"""What stands in the module tree that a stage's forward walks: calls to the stage's own parts, and to passed-over ones.

`OwnPart` looks its module up in the stage, so that a replaced layer takes effect. `PassedOver` stands for a module of
another stage: it has the attributes of the module, and none of its memory.
"""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.split.planned.attributes import bound_to
from pipeloom.split.planned.collected import collecting_hooks
from pipeloom.split.planned.containers import UNCHANGED

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def without_memory(module: nn.Module, *, collects: bool = False) -> nn.Module:
    """A module of the same class with the same attributes, whose parameters and buffers are on the meta device.

    Forward hooks stay behind, except those that collect outputs in a model that returns what it collects (`collects`).
    """
    collects = collects or bool(getattr(module, "_can_record_outputs", None))
    twin = shallow_copy(module)
    for kind in ("_parameters", "_buffers"):
        tensors = vars(module)[kind].items()
        vars(twin)[kind] = {
            name: None if t is None else t.detach().to("meta").requires_grad_(t.requires_grad) for name, t in tensors
        }
    for hooks in HOOKS:
        vars(twin)[hooks] = OrderedDict()
    if collects:
        twin._forward_hooks.update(enumerate(collecting_hooks(module)))
    twin._modules = {
        name: None if part is None else without_memory(part, collects=collects)
        for name, part in module._modules.items()
    }
    return twin


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module object with the same attributes, also the same parameters and submodules, in a dict of its own.

    Methods of the module that are set on the instance, such as a replaced forward, are bound to the copy.
    """
    copy: nn.Module = object.__new__(type(module))
    for name, value in vars(module).items():
        vars(copy)[name] = bound_to(copy, value, module)
    copy._modules = dict(module._modules)
    return copy


class OwnPart(nn.Module):
    """Stands where a model calls a module that its stage has.

    Args:
        stage: its `current_run` runs the module; without one, the module runs alone. In a copy of the stage, the
            copy.
        part: index of the part in the stage, or the name of another module.
        home, key: the dictionary with the module, and its key there.
    """

    def __init__(self, stage: nn.Module, part: int | str, home: dict[str, nn.Module | None], key: str) -> None:
        super().__init__()
        self._link = (stage, part, home, key)  # in a tuple: the stage is no submodule
        self._modules["part"] = home[key]

    def __call__(self, *args: Any, **settings: Any) -> Any:  # hooks are those of the module
        stage, part, home, key = self._link
        run: Any = stage.current_run
        module: Any = home[key]
        if run is None:
            return module(*args, **settings)
        if isinstance(part, str):
            return run.run_other(part, module, args, settings)
        done = run.done
        if part not in run.plain or (done and part <= done[-1]):
            return run.run_part(part, module, args, settings)
        for value in (*args, *settings.values()):
            if value is not None and type(value) not in UNCHANGED:
                return run.run_part(part, module, args, settings)
        # Almost all parts of almost all forwards: nothing arrives for them, and nothing of them is sent.
        run.thread["layer"] = module
        result = module(*args, **settings)
        done.append(part)
        return result

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if "_link" not in vars(self):
            raise AttributeError(name)
        stage, part, home, key = vars(self)["_link"]
        return stage.read(part, name, getattr(home[key], name))


class PassedOver(nn.Module):
    """Stands where a model calls a module of another stage.

    Args:
        stage: calls ``stage.pass_over(place, name, twin, args, settings)``, with a `twin` of the module without memory.
        place: of the part in the model; None: the module is no part.
        name: fully qualified.
        module: the module. Of its hooks, those remain that collect outputs: a model may index what they collect.
    """

    def __init__(self, stage: nn.Module, place: int | None, name: str, module: nn.Module) -> None:
        super().__init__()
        # In a tuple: not a submodule, so hooks and parameters of the module are not here.
        self._link = (stage, place, name, without_memory(module), collecting_hooks(module))

    def __call__(self, *args: Any, **settings: Any) -> Any:
        stage, place, name, twin, hooks = vars(self)["_link"]
        result = stage.pass_over(place, name, twin, args, settings)
        if not stage.collects(name):
            for hook in hooks:
                hook(self, args, result)
        return result

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        if "_link" not in vars(self):
            raise AttributeError(name)
        stage, _, own, twin, _ = vars(self)["_link"]
        return stage.read_absent(f"{own}.{name}", getattr(twin, name))


Format = torch.dtype | None


def format_of(module: nn.Module) -> Format:
    """The dtype of a module's floating-point parameters: of the first one. None: there are none."""
    return next((parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()), None)


def shaped_like_result(
    twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any], formats: tuple[Format, Format] = (None, None)
) -> Any:
    """Zeros in the shapes that a module would return, without computing anything.

    Args:
        twin: the module, without memory.
        args, settings: of the call.
        formats: results of the first dtype get the second.
    """
    result = _shaped_like_result(twin, args, settings)
    before, now = formats
    if now in (None, before):
        return result
    return tree_map_only(Tensor, lambda t: t.to(now) if t.dtype == before else t, result)


def _shaped_like_result(twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    given = [leaf for leaf in tree_leaves((args, settings)) if isinstance(leaf, Tensor)]
    device = given[0].device if given else torch.device("cpu")
    table = getattr(twin, "weight", None)
    if isinstance(table, Tensor) and (isinstance(twin, nn.Embedding) or hasattr(twin, "look_up")) and given:
        return torch.zeros(*given[0].shape, table.shape[1], dtype=table.dtype, device=device)
    with torch.no_grad():
        to_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, settings))
        result = twin(*to_meta[0], **to_meta[1])
    return zeros_like(result, device)


def zeros_like(value: Any, device: torch.device | None = None) -> Any:
    """The value with zeros in place of its tensors."""
    return tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device or t.device), value)
