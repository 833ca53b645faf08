"""`PlannedStage`: a stage that runs the forward of a model whose parts have a known order (see `layouts`).

    parts     embed_tokens   layers.0   layers.1   layers.2   norm   lm_head
    stage 0   runs           runs       leaves the forward behind layers.0
    stage 1   zeros          received   runs       runs       runs   runs: the model's own result

The forward runs on a shallow copy of the model's containers. Parts of other stages are passed over: those before the
stage return zeros, except the last of them, which returns what the previous stage's last part returned. Behind its own
last part, a stage leaves the forward, so nothing later runs there. The model's keyword arguments travel along.
What else later stages read travels too: arguments of their parts that were computed by earlier parts, entries that
parts left in a dict or list among their arguments, and outputs that transformers collects, such as router logits.
They are found in the first forward of each form of inputs (see `origins`).
"""

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from pipeloom.errors import SplitError
from pipeloom.split.planned.caches import fill_others, lengths_of
from pipeloom.split.planned.collected import collected_outputs, collector
from pipeloom.split.planned.forward_state import Forward, Leave, containers_of, entries_of
from pipeloom.split.planned.layouts import Layout
from pipeloom.split.planned.origins import EARLIER, LAST, LATER, OWN, Origins, tensors_of, with_tensors
from pipeloom.split.planned.stand_ins import (
    OwnPart,
    PassedOver,
    format_of,
    shallow_copy,
    shaped_like_result,
    without_memory,
    zeros_like,
)
from pipeloom.split.stage_module import BlockRunner, StageModule, _Namespace, running

_FIRST = ""  # the key of the model's first argument, given without a name


class PlannedStage(StageModule):
    """A stage of consecutive parts of a model, which runs the model's forward.

    Args:
        layers: names and modules of the stage's parts.
        model: the whole model.
        chain: names of all parts of the model, in order, and whether each is a repeated block.
        layout: where these come from.
    """

    sliceable: Any = "runs a model's own forward, which takes whole sequences"

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        model: nn.Module,
        chain: Sequence[tuple[str, bool]],
        layout: Layout,
    ) -> None:
        layers = list(layers)
        blocks = [name for name, is_block in chain if is_block]
        super().__init__(layers, blocks)
        self._names = [name for name, _ in layers]
        self._places = {name: place for place, (name, _) in enumerate(chain)}
        self._blocks = frozenset(blocks)
        self._first, self._last = (self._places[self._names[end]] for end in (0, -1))
        self._end = len(chain) - 1
        self._keeps_others = blocks[0] in self._names or self._last == self._end
        self._layout = layout
        self._containers: list[nn.Module] = []
        self._training = model.training
        self._known: dict[Any, tuple[str, ...]] = {}
        self._current: Forward | None = None
        self._cache: Any = None
        self._shell = (self._shell_of(model, ""),)  # in a tuple: it is no submodule
        base: Any = model.get_submodule(layout.base)
        self._without_cache = "use_cache" in inspect.signature(base.forward).parameters
        arguments = inspect.signature(self._shell[0].forward).parameters
        self._arguments_known = frozenset(arguments)
        self._takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in arguments.values())
        self._model_name = type(model).__name__
        self._format_of_model = format_of(self)

    @property
    def whole_model(self) -> nn.Module:
        """The model that the stage was cut from, with parts of other stages passed over."""
        return self._shell[0]

    # The module tree that the forward walks

    def _shell_of(self, module: nn.Module, name: str) -> nn.Module:
        if name in self._places:
            return self._part(module, name)
        prefix = f"{name}." if name else ""
        holds_parts = any(part.startswith(prefix) for part in self._places)
        if not holds_parts and type(module).forward is not nn.Module.forward:
            return self._other(module, name)
        shell = shallow_copy(module)
        self._containers.append(shell)
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            home = self._namespace(name)
            home._parameters, home._buffers = dict(module._parameters), dict(module._buffers)
            home._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
            shell._parameters, shell._buffers = home._parameters, home._buffers
        for key, child in module._modules.items():
            shell._modules[key] = None if child is None else self._shell_of(child, prefix + key)
        return shell

    def _namespace(self, name: str) -> nn.Module:
        """The module of this stage with the name of a container of the model."""
        parent: nn.Module = self
        for part in name.split(".") if name else ():
            if part not in parent._modules:
                parent.add_module(part, _Namespace())
            parent = parent.get_submodule(part)
        return parent

    def _part(self, module: nn.Module, name: str) -> nn.Module:
        if name in self._names:
            index = self._names.index(name)
            return OwnPart(self, index, *self._chain[index])
        return PassedOver(self, self._places[name], name, without_memory(module))

    def _other(self, module: nn.Module, name: str) -> nn.Module:
        """A module that is no part: in front of the blocks or behind them, or without parameters."""
        if next(module.parameters(), None) is None:
            return OwnPart(self, name, *self.place(name, copy.deepcopy(module)))
        if self._keeps_others:
            return OwnPart(self, name, *self.place(name, module))
        return PassedOver(self, None, name, without_memory(module))

    def call_own(self, part: int | str, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Called by an `OwnPart`: a part by its index, or another module by its name."""
        if isinstance(part, int):
            return self._run_part(part, args, settings)
        return self._run_other(self.get_submodule(part), args, settings)

    def pass_over(
        self, place: int | None, name: str, twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        """Called by a `PassedOver`: a part by its place in the model, or another module."""
        if place is None:
            return self._zeros(twin, args, settings, EARLIER)
        pass_part = self._pass_earlier if place < self._first else self._pass_later
        return pass_part(place, name, twin, args, settings)

    @property
    def shell(self) -> Any:
        """The copy of the model's containers that forwards run on: an instance of the model's class."""
        return self._shell[0]

    @contextmanager
    def decoding(self, cache: Any) -> Iterator[None]:
        """Inside the block, the model's forward gets `cache` as `past_key_values`, of this stage alone."""
        self._cache = cache
        try:
            yield
        finally:
            self._cache = None

    # A forward

    def forward(self, value: Any, run: BlockRunner | None = None) -> Any:
        """Run this stage's parts inside the model's forward.

        Args:
            value: on the first stage the model's first argument, or a dict of its keyword arguments; else the message
                of the previous stage.
            run: runs the blocks; by default they are called directly.

        Returns:
            A message for the next stage, or on the last stage what the model returns.

        Raises:
            SplitError: the forward calls parts in another order than the layout, or a part reads what other stages
                compute in a way that stages cannot exchange.
        """
        if self._first == 0:
            call = Forward(run, self._arguments(value), {})
        else:
            call = Forward(run, dict(value["inputs"]), value)
        if self.training != self._training:
            self._training = self.training
            for container in self._containers:
                container.training = self.training
        form = self._form(call)
        known = self._known.get(form)
        call.sends = known or ()
        if known is None:
            call.origins = Origins()
            call.origins.mark([value for name, value in call.arrived.items() if name != "inputs"], OWN)
        settings = dict(call.inputs)
        first = (settings.pop(_FIRST),) if _FIRST in settings else ()
        if self._cache is not None:
            settings.update(past_key_values=self._cache, use_cache=True)
        elif self._without_cache:
            settings.setdefault("use_cache", False)
        self._current = call
        lengths = lengths_of(self._cache)
        try:
            with call.origins or nullcontext():
                output = self._shell[0](*first, **settings)
            self._check_keys(lengths)
        except Leave as left:
            if left.stage is not self:
                raise
            self._check_keys(lengths)
            return self._message(call, form)
        finally:
            self._current = None
            fill_others(self._cache, lengths, call.inputs.get("input_ids", first[0] if first else None))
        self._check_end(call, output)
        self._known[form] = ()
        return output

    def _check_keys(self, before: list[int]) -> None:
        """Raises SplitError where all blocks of a stage read keys and values of other stages' layers."""
        if self._cache is not None and self._blocks & set(self._names) and lengths_of(self._cache) == before:
            raise SplitError(
                f"generate: the layers of the stage from {self._names[0]!r} keep no keys of their own, but use "
                "those of other stages. Use fewer stages, or a cut that keeps these layers together."
            )

    def joined(self, value: Any, more: Mapping[str, Any]) -> Any:
        """A value for this stage with more keyword arguments of the model."""
        if self._first > 0:
            return {**value, "inputs": {**value["inputs"], **more}}
        return {**self._arguments(value), **more}

    def _arguments(self, value: Any) -> dict[str, Any]:
        """The keyword arguments of the model: a dict of these, or its first argument."""
        if isinstance(value, Mapping) and (self._takes_any or self._arguments_known.issuperset(value)):
            return dict(value)
        return {_FIRST: value}

    def _form(self, call: Forward) -> Any:
        kinds = tuple((name, type(value)) for name, value in call.inputs.items())
        flags = tuple((name, value) for name, value in call.inputs.items() if isinstance(value, bool))
        return self.training, kinds, flags, None if self._cache is None else any(lengths_of(self._cache))

    def _message(self, call: Forward, form: Any) -> dict[str, Any]:
        if call.origins is not None:
            self._known[form] = tuple(call.found)
        message: dict[str, Any] = {"value": call.result, "inputs": call.inputs}
        if call.found:
            message["extras"] = call.found
        if call.entries:
            message["entries"] = call.entries
        if call.collected:
            message["collected"] = call.collected
        return message

    def _check_end(self, call: Forward, output: Any) -> None:
        if len(call.done) != len(self._names) or self._last != self._end:
            missing = next((n for i, n in enumerate(self._names) if i not in call.done), self._names[-1])
            raise SplitError(
                f"the forward of {self._model_name} ended without calling {missing!r}, which {self._layout.declared} "
                "names, as a part of the model. Pass layers=, or a model whose forward calls its modules."
            )
        if call.origins is not None and call.origins.of(output) & EARLIER:
            raise SplitError(
                f"the result of {self._model_name} reads what earlier stages computed, beside the result of "
                f"{self._names[0]!r} and later parts: it would be wrong. Use one stage."
            )

    # Parts

    def _run_part(self, index: int, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        call = self._current
        modules, key = self._chain[index]
        layer: Any = modules[key]
        if call is None:
            return layer(*args, **settings)
        name, place = self._names[index], self._first + index
        if index in call.done or (call.done and index < call.done[-1]):
            raise SplitError(self._order(name))
        call.done.append(index)
        if call.extras:
            prefix = f"{name}|"
            given = {k.removeprefix(prefix): v for k, v in call.extras.items() if k.startswith(prefix)}
            args, settings = with_tensors(args, settings, given)
        containers = containers_of(args, settings)
        if index == 0 and containers:
            self._fill(call, containers)
        before = {place: entries_of(container) for place, container in containers.items()}
        origins = call.origins
        if origins is not None:
            self._check_arguments(origins, name, args, settings)
            origins.quiet = True
        running.layer = layer
        if self.observer is not None:
            self.observer.before(index)
        if call.run is None or not self._is_block[index]:
            result = layer(*args, **settings)
        else:
            result = call.run([layer], layer, *args, **settings)
        if self.observer is not None:
            self.observer.after(index, result)
        for where, container in containers.items():
            for entry, value in entries_of(container).items():
                if before[where].get(entry) is not value:
                    call.entries.setdefault(where, {})[entry] = value
        ends = place == self._last and self._last < self._end
        if origins is not None:
            origins.quiet = False
            origins.replace(result, LAST if ends else OWN)
        if ends:
            call.result = result
            found = collector()
            call.collected = {} if found is None else collected_outputs(found)
            if origins is None and not call.sends:
                raise Leave(self)
        return result

    def _order(self, name: str) -> str:
        return (
            f"the forward of {self._model_name} runs {name!r} twice or in another order than {self._layout.declared}: "
            "stages run their parts once. Use one stage."
        )

    def _fill(self, call: Forward, containers: Mapping[str, Any]) -> None:
        """Add the entries that parts of earlier stages left in dicts and lists among their arguments."""
        for place, entries in call.arrived.get("entries", {}).items():
            container = containers.get(place)
            if isinstance(container, MutableMapping):
                container.update(entries)
            elif isinstance(container, list):
                container[:] = [entries[index] for index in sorted(entries)]

    def _check_arguments(self, origins: Origins, name: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
        for place, tensor in tensors_of(args, settings):
            if origins.of_tensor(tensor) & EARLIER:
                raise SplitError(
                    f"{name!r} reads argument {place!r}, which combines what several earlier stages compute: stages "
                    "cannot exchange it. Use one stage, or a cut that keeps these parts together."
                )

    def _run_other(self, module: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        origins = None if self._current is None else self._current.origins
        if origins is None or next(module.parameters(), None) is None:
            return module(*args, **settings)
        given, origins.quiet = origins.of((args, settings)), True
        result = module(*args, **settings)
        origins.quiet = False
        origins.mark(result, given or (OWN if self._blocks & set(self._names) else 0))
        return result

    def _zeros(self, twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any], origin: int) -> Any:
        origins = None if self._current is None else self._current.origins
        formats = self._format_of_model, format_of(self)  # another one since a `Precision` cast the parameters
        if origins is None:
            return shaped_like_result(twin, args, settings, formats)
        origins.quiet = True
        result = shaped_like_result(twin, args, settings, formats)
        origins.quiet = False
        origins.mark(result, origin)
        return result

    def _pass_earlier(
        self, place: int, name: str, twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        call = self._current
        assert call is not None
        if call.done or name in call.passed:
            raise SplitError(self._order(name))
        call.passed.add(name)
        if place == self._first - 1:
            found = collector()
            if found is not None:
                for key, values in call.arrived.get("collected", {}).items():
                    found[key] = list(values)
            return call.arrived["value"]
        if name not in self._blocks:
            return self._zeros(twin, args, settings, EARLIER)
        if call.placeholder is None:
            call.placeholder = self._placeholder(call)
        if call.origins is not None:
            call.origins.mark(call.placeholder, EARLIER)
        return call.placeholder

    def _placeholder(self, call: Forward) -> Any:
        if call.origins is None:
            return zeros_like(call.arrived["value"])
        call.origins.quiet = True
        result = zeros_like(call.arrived["value"])
        call.origins.quiet = False
        return result

    def _pass_later(
        self, place: int, name: str, twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        call = self._current
        assert call is not None
        for where, tensor in tensors_of(args, settings):
            key = f"{name}|{where}"
            if call.origins is None:
                wanted = key in call.sends
            else:
                origin = call.origins.of_tensor(tensor)
                computed = bool(origin & OWN) or (bool(origin & LAST) and place > self._last + 1)
                wanted = (key in call.extras or computed) and not origin & LATER
            if wanted:
                call.found[key] = call.extras.get(key, tensor)
        if place == self._end or (call.origins is None and len(call.found) == len(call.sends)):
            raise Leave(self)
        if call.origins is None:
            return call.result if name in self._blocks else self._zeros(twin, args, settings, LATER)
        if name not in self._blocks:
            if place > max(self._places[block] for block in self._blocks):
                raise Leave(self)  # heads: their arguments follow from the result of the last block
            return self._zeros(twin, args, settings, LATER)
        call.origins.quiet = True
        result = zeros_like(call.result)
        call.origins.quiet = False
        call.origins.mark(result, LATER)
        return result
