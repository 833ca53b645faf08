"""`PlannedStage`: a stage that runs the forward of a model whose parts have a known order (see `layouts`).

    parts     embed_tokens   layers.0   layers.1   layers.2   norm   lm_head
    stage 0   runs           runs       leaves the forward behind layers.0
    stage 1   zeros          received   runs       runs       runs   runs: the model's own result

The forward runs on a shallow copy of the model's containers. Parts of other stages are passed over: those before the
stage return zeros, except the last of them, which returns what the previous stage's last part returned. Behind its own
last part, a stage leaves the forward, so nothing later runs there. The model's keyword arguments travel along.
What else later stages read travels too: arguments of their parts that were computed by earlier parts, entries that
parts left in a dict or list among their arguments, and outputs that transformers collects, such as router logits.
They are found in the first forward of each form of inputs (see `tracking.origins`).
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.errors import PipeloomError, SplitError
from pipeloom.split.layouts.around import set_forward
from pipeloom.split.layouts.layout import Layout
from pipeloom.split.planned.arguments import FIRST, ModelArguments, form_of
from pipeloom.split.planned.attributes import SharedAttributes
from pipeloom.split.planned.caches import fill_others, lengths_of
from pipeloom.split.planned.containers import Format, format_of, has_tensors, shaped_like_result
from pipeloom.split.planned.forward.exploration import Exploration
from pipeloom.split.planned.forward.forward_run import ForwardRun
from pipeloom.split.planned.forward.known import Known, KnownForwards
from pipeloom.split.planned.forward.other_modules import read_own, run_other
from pipeloom.split.planned.forward.other_parts import OtherParts
from pipeloom.split.planned.model_copy import ModelCopy
from pipeloom.split.planned.place import Leave, StagePlace
from pipeloom.split.planned.stand_ins import OwnPart
from pipeloom.split.planned.tracking.decisions import OtherDecision
from pipeloom.split.stage_module import BlockRunner, StageModule


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
        super().__init__(layers, [name for name, is_block in chain if is_block])
        is_set = set_forward(model) is not None
        names = [name for name, _ in layers]
        self._where = StagePlace(names, chain, layout, type(model).__name__, forward_is_set=is_set)
        self._training = model.training
        self._known = KnownForwards()
        lasting = (i for i, (name, part) in enumerate(layers) if name in self._where.blocks or _has_float_buffers(part))
        self._lasting = next(lasting, -1)
        self.alike: dict[str, str] = {}  # blocks of later stages, and the first with a result of the same form
        self.others_with_parameters: set[str] = set()  # modules that are no parts
        self.current_run: ForwardRun | None = None
        self._others: OtherParts | None = None  # in the current forward
        self._cache: Any = None
        self._has_warned = False
        self._copy = ModelCopy(self, self._where, model)
        base: Any = model.get_submodule(layout.base)
        self._without_caches = {name: False for name in ("use_cache", "use_mems") if _takes(name, base, model)}
        self._arguments = ModelArguments(self.whole_model.forward)
        self._format_of_model = format_of(self)
        self._shared = SharedAttributes(model, self._where)

    @property
    def whole_model(self) -> Any:
        """The model that the stage was cut from, with parts of other stages passed over: of the model's class."""
        return self._copy.model

    def know_cut(self, sizes: Sequence[int]) -> None:
        """Know the number of parts per stage, and so refuse on the first stage what a later one cannot compute."""
        self._where.stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]

    # The module tree that the forward walks

    def own_part(self, index: int) -> OwnPart:
        """Stands where the model calls the stage's part `index`."""
        return OwnPart(self, index, *self._chain[index])

    def _around(self, run: BlockRunner | None, index: int, layer: Any) -> Callable[..., Any]:
        """A part with the runner of blocks and the observer around it."""
        if run is not None and self._is_block[index]:
            layer = partial(run, [layer], layer)
        return layer if self.observer is None else partial(self._observed, index, layer)

    def _observed(self, index: int, run: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        assert self.observer is not None
        self.observer.before(index)
        result = run(*args, **settings)
        self.observer.after(index, result)
        return result

    def pass_over(
        self, place: int | None, name: str, twin: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        """Called by a `PassedOver`: a part by its place in the model, or another module."""
        others = self._other_parts()
        if others is None:
            return shaped_like_result(twin, args, settings)
        if place is None:
            return others.pass_other(name, twin, args, settings)
        if place < self._where.first:
            return others.pass_earlier(name, twin, args, settings)
        return others.pass_later(place, name, twin, args, settings)

    def _other_parts(self) -> OtherParts | None:
        """The `OtherParts` of the current forward; None: there is none."""
        if self._others is None and self.current_run is not None:
            self._others = OtherParts(self.current_run)
        return self._others

    def collects(self, name: str) -> bool:
        """Whether what was collected up to the part `name` arrived from the stage before."""
        return name == self._where.before

    @property
    def names(self) -> list[str]:
        """The names of the stage's parts."""
        return self._where.names

    @property
    def lists_own(self) -> bool:
        """Whether a container of the copied model lists the parameters or modules that the stage has."""
        return self._copy.lists_own

    def is_everywhere(self, part: int | str) -> bool:
        """Whether every stage has the module."""
        return isinstance(part, str) and (part in self._where.everywhere or part not in self.others_with_parameters)

    def read(self, part: int | str, name: str, value: Any) -> Any:
        """Called by an `OwnPart` whose attribute the model reads."""
        call = self.current_run
        if call is None or self.is_everywhere(part) or not has_tensors(value):
            return value
        return read_own(call, f"{part if isinstance(part, str) else self.names[part]}.{name}", value)

    def run_inside(
        self, part: int | str, name: str, module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]
    ) -> Any:
        """Called by a stand-in for a module inside of a part, which the model calls itself."""
        call = self.current_run
        if call is None:
            return module(*args, **settings)
        outer = part if isinstance(part, str) else self.names[part]
        call.called_inside.setdefault(outer, f"{outer}.{name}")
        return run_other(call, f"{outer}.{name}", module, args, settings, is_inside=not isinstance(part, str))

    def read_absent(self, key: str, value: Any) -> Any:
        """Called by a `PassedOver` whose attribute the model reads."""
        others = self._other_parts()
        return value if others is None else others.read_absent(key, value)

    @property
    def num_blocks(self) -> int:
        """The number of repeated layers of the whole model."""
        return len(self._where.blocks)

    @contextmanager
    def decoding(self, cache: Any) -> Iterator[None]:
        """Inside the block, the model's forward gets `cache` as `past_key_values`, of this stage alone."""
        self._cache = cache
        try:
            yield
        finally:
            self._cache = None

    # A forward

    def check_inputs(self, value: Any) -> None:
        """Raises InputError for a micro-batch that is no arguments of the model's forward. Called on every stage."""
        if not self._where.first:
            self._arguments.check(value, type(self.whole_model).__name__)

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
        arrived = value if self._where.first else {}
        inputs = dict(arrived["inputs"]) if arrived else self._arguments.of(value)
        if self.training != self._training:
            self._training = self.training
            self._copy.train(self.training)
        if self._copy.attributes.update():  # the forward may go another way
            self._known.clear()
            self.alike.clear()
        form = self._form(inputs)
        known = self._known.last_used(form)
        around = None if run is None and self.observer is None else partial(self._around, run)
        while True:
            if known is None:
                call: ForwardRun = Exploration(self, self._where, inputs, arrived, self._lasting, around)
                self._copy.attributes.begin(call.origins)
            else:
                draws = self._known.draws(form)
                call = ForwardRun(self, self._where, inputs, arrived, known, self._lasting, draws, around)
            try:
                output = self._run(call, inputs, form)
            except OtherDecision as other:
                assert call.watch is not None
                call.watch.restore_draws()
                known = self._known.begins_with(form, other.seen)
            else:
                if known is not None and known.decisions:  # else it is the only one
                    self._known.used(form, known)
                return output

    def _run(self, call: ForwardRun, inputs: Mapping[str, Any], form: Any) -> Any:
        """The model's forward in one run: the message for the next stage, or what the model returns.

        Raises:
            OtherDecision: it does not follow the forward that the run knows.
        """
        cache = self._cache
        settings = dict(inputs)
        first = (settings.pop(FIRST),) if FIRST in settings else ()
        if cache is not None:
            settings.update(past_key_values=cache, use_cache=True)
        else:
            settings = self._without_caches | settings
        lengths = [] if cache is None else lengths_of(cache)
        own = vars(self)  # nn.Module looks at what is set, which takes long
        own["current_run"] = call
        begins_again, gradients = False, torch.is_grad_enabled()
        try:
            if call.draws is None and call.watch is None:
                output = self._copy.model(*first, **settings)
            else:
                with call.followed():
                    output = self._copy.model(*first, **settings)
            if cache is not None:
                self._check_keys(lengths)
            if isinstance(call, Exploration) and call.explores:
                call.add_results_in(output)
            if call.is_past_own:
                raise Leave(self)
        except Leave as left:
            if left.stage is not self:
                raise
            if cache is not None:
                self._check_keys(lengths)
            return self._message(form, call)
        except OtherDecision:
            begins_again = True
            raise
        except PipeloomError:
            raise
        except Exception as error:  # some code does not work on zeros
            if not call.is_past_own and call.has_only_zeros:
                raise self._where.raised_on_zeros(error) from error
            if not call.is_past_own:
                raise
            return self._message(form, call)
        finally:
            own["current_run"] = own["_others"] = None
            torch._C._set_grad_enabled(gradients)  # the forward may be left where it has switched them off
            if cache is not None and not begins_again:
                fill_others(cache, lengths, inputs.get("input_ids", first[0] if first else None))
        output = call.finished(output)
        if cache is None:
            call.check_whole()
        self._learn(form, call)
        return output

    def shared_tensors(self, name: str) -> list[Tensor]:
        """The tensors in dicts and lists that the part and modules of other stages have as attributes."""
        return self._shared.tensors(name)

    def _message(self, form: Any, call: ForwardRun) -> dict[str, Any]:
        if self._cache is None:
            call.check_whole()
        if isinstance(call, Exploration):
            call.end()
        self._learn(form, call)
        return call.message()

    def _learn(self, form: Any, call: ForwardRun) -> None:
        """Keep what an exploring forward has found, unless the next one may go another way."""
        if isinstance(call, Exploration):
            if (shared := call.shared_rule) is not None and not self._has_warned:
                self._has_warned = True
                warnings.warn(self._where.shares_rule(*shared), stacklevel=2)
            if self._copy.attributes.unchanged(call.origins) and not call.decides:
                found = tuple(call.found), call.decisions, self._lasting, call.forms.unlike, call.aliases
                self._known.add(form, Known.of(self._where, *found))
        if call.seed is not None:
            self._known.add_drawing(form)

    def own_value(self, name: str) -> Any:
        """What a forward reads of one of the stage's parts, by the name of the attribute in the model; or None."""
        for part, (modules, key) in zip(self._where.names, self._chain, strict=True):
            if name.startswith(f"{part}."):
                value: Any = modules[key]
                for attribute in name.removeprefix(f"{part}.").split("."):
                    value = getattr(value, attribute, None)
                return value if has_tensors(value) else None
        return None

    def outer_buffers(self) -> list[dict[str, Any]]:
        """The buffers of modules outside of the stage's parts, by module."""
        layers: list[Any] = [modules[key] for modules, key in self._chain]
        inside = {id(part) for layer in layers for part in layer.modules()}
        return [part._buffers for part in self.modules() if part._buffers and id(part) not in inside]

    def container_buffers(self) -> set[int]:
        """The identities of buffers of the modules around the parts: every stage makes their changes."""
        return self._copy.buffers()

    def _check_keys(self, before: list[int]) -> None:
        """Raises SplitError where all blocks of a stage read keys and values of other stages' layers."""
        where = self._where
        if where.blocks & set(where.names) and lengths_of(self._cache) == before:
            raise SplitError(
                f"generate: the layers of the stage from {where.names[0]!r} keep no keys of their own, but use "
                "those of other stages. Use fewer stages, or a cut that keeps these layers together."
            )

    def parameter_formats(self) -> tuple[Format, Format]:
        """The dtype that the model's parameters had, and the one that they have since a `Precision` cast them."""
        return self._format_of_model, format_of(self)

    def joined(self, value: Any, more: Mapping[str, Any]) -> Any:
        """A value for this stage with more keyword arguments of the model."""
        if self._where.first > 0:
            return {**value, "inputs": {**value["inputs"], **more}}
        return {**self._arguments.of(value), **more}

    def seeded(self, value: Any) -> Any:
        """A value for this stage with which a forward makes no seed of its own."""
        return {**value, "seed": value.get("seed") or 1} if self._where.first > 0 else value

    def _form(self, inputs: Mapping[str, Any]) -> Any:
        """What the way of values through a forward may depend on."""
        kinds: list[Any] = [self.training]
        if self._cache is not None:
            kinds.append(any(lengths_of(self._cache)))
        return (*kinds, *form_of(inputs, shapes=self._cache is None))


def _takes(name: str, base: Any, model: Any) -> bool:
    """Whether a model has an option: its forward names it, or hands all options on and its configuration has it."""
    if name in inspect.signature(base.forward).parameters:
        return True
    forwards = [inspect.signature(forward).parameters.values() for forward in (model.forward, type(model).forward)]
    hands_on = all(any(each.kind is each.VAR_KEYWORD for each in taken) for taken in forwards)
    return hands_on and getattr(getattr(model, "config", None), name, None) is not None


def _has_float_buffers(module: nn.Module) -> bool:
    return any(buffer.is_floating_point() for buffer in module.buffers())
