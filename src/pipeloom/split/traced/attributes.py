"""Attributes of modules that a forward changes while it is traced. Stages run a graph, which changes none."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from pipeloom.errors import SplitError
from pipeloom.split.attribute_contents import OF_TORCH, contents_of, same
from pipeloom.split.traced.segments import base_of, written

_WAYS = "Keep it in a buffer (register_buffer), or name the layers with layers="


class ChangedAttributes:
    """The attributes that the forward of a model changed, and whether it read them before.

    Args:
        model: the traced model.

    Attributes:
        carried: names of those that one call reads and an earlier call changed.
        losses: names of those that are set to one number with a gradient.
        set_only: names of those that are set before they are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(part): (name, part) for name, part in model.named_modules()}
        self._first: dict[tuple[int, str], str] = {}  # use of an attribute
        self._open = False
        self.carried: list[str] = []
        self.losses: list[str] = []
        self.set_only: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In the block the model may be called; afterwards its attributes are those of before.

        Raises:
            SplitError: a call depends on what an earlier call left in an attribute, or leaves a loss there.
        """
        bound = {key: dict(vars(part)) for key, (_, part) in self._names.items()}
        before = {key: contents_of(each) for key, each in bound.items()}

        def begin(*_: Any) -> None:
            self._open = True

        def end(*_: Any) -> None:
            self._open = False
            self._compare(bound, before)

        hooks = [self._model.register_forward_pre_hook(begin, prepend=True), self._model.register_forward_hook(end)]
        try:
            with self._uses_recorded(), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The tensor attribute")  # torch's own of tensors that are set
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for key, (_, part) in self._names.items():
                for name in vars(part).keys() - bound[key].keys():
                    del vars(part)[name]
                now = contents_of(bound[key])  # torch has put copies in the place of containers
                kept = {name for name, value in now.items() if same(value, before[key][name])}
                vars(part).update((name, bound[key][name]) for name in kept)
        self._refuse()

    @contextmanager
    def _uses_recorded(self) -> Iterator[None]:
        """In the block, reading and setting attributes of the modules is recorded."""
        get, set_ = nn.Module.__getattribute__, nn.Module.__setattr__

        def record(module: nn.Module, name: str, use: str) -> None:
            if self._open and id(module) in self._names:
                self._first.setdefault((id(module), name), use)

        def recorded_get(module: nn.Module, name: str) -> Any:
            record(module, name, "read")
            return get(module, name)

        def recorded_set(module: nn.Module, name: str, value: Any) -> None:
            record(module, name, "set")
            set_(module, name, value)

        nn.Module.__getattribute__ = recorded_get  # type: ignore[method-assign, assignment]
        nn.Module.__setattr__ = recorded_set  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
            nn.Module.__setattr__ = set_  # type: ignore[method-assign]

    def _compare(self, bound: Mapping[int, dict[str, Any]], before: Mapping[int, dict[str, Any]]) -> None:
        for key, (owner, part) in self._names.items():
            now = dict(vars(part))
            contents = contents_of(now)
            for name in sorted(now.keys() | bound[key].keys()):
                if isinstance(part, nn.RNNBase) and name.startswith("_flat_weight"):  # torch's views of its parameters
                    continue
                if name in OF_TORCH or same(contents.get(name, OF_TORCH), before[key].get(name, OF_TORCH)):
                    continue
                path = f"{owner}.{name}" if owner else name
                value = now.get(name)
                is_kept = value is bound[key].get(name, OF_TORCH)  # only its contents changed
                if is_kept or self._first.get((key, name)) != "set":
                    found = self.carried
                elif isinstance(value, Tensor) and not value.dim() and value.requires_grad:
                    found = self.losses
                else:
                    found = self.set_only
                if path not in found:
                    found.append(path)

    def _refuse(self) -> None:
        kind = type(self._model).__name__
        if self.carried:
            raise SplitError(
                f"the forward of {kind} changes {_listed(self.carried)} and may read it in the next call: a trace "
                f"would keep the value of one call. {_WAYS}."
            )
        if self.losses:
            raise SplitError(
                f"the forward of {kind} sets {_listed(self.losses)} to a number with a gradient, as a loss: stages "
                "would not set it. Return it from the forward, or name the layers with layers= and use "
                "pl.auxiliary_loss."
            )


def forbid_changed_constants(model: nn.Module, graph: fx.Graph, constants: Mapping[str, str]) -> None:
    """Check that a graph changes no tensor in place that is an attribute, but no buffer.

    Args:
        model: the traced model.
        graph: its operations.
        constants: names of such tensors by placeholder.

    Raises:
        SplitError: it does.
    """
    for node in graph.nodes:
        for changed in written(node):
            name = constants.get(base_of(changed).name)
            if name is not None:
                raise SplitError(
                    f"the forward of {type(model).__name__} changes the tensor {name!r} in place, which is no buffer: "
                    f"the model would keep its old value. {_WAYS}."
                )


def tell_set(model: nn.Module, names: list[str]) -> None:
    """Warn of attributes that stages do not set."""
    if names:
        warnings.warn(
            f"the forward of {type(model).__name__} sets {_listed(names)}, and stages of a traced model set no "
            "attributes: outside of the forward, as in loss_fn, it keeps its old value. Return it from the forward to "
            "read it.",
            stacklevel=2,
        )


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more attributes" if len(names) > 3 else ""
    return f"the attribute{'s' if names[1:] else ''} {', '.join(map(repr, names[:3]))}{more}"
