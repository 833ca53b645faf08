"""`ForwardRun`: one forward of a planned stage: what happens where the model calls its parts, and how it ends."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.split.planned.collected import collected_outputs, collector
from pipeloom.split.planned.containers import all_of, containers_of, each_once, entries_of
from pipeloom.split.planned.draws import SharedDraws
from pipeloom.split.planned.kept_buffers import KeptBuffers
from pipeloom.split.planned.origins import (
    DRAWN,
    EARLIER,
    IN_UNIT,
    LAST,
    LATER,
    OWN,
    Origins,
    tensors_of,
    with_tensors,
)
from pipeloom.split.planned.place import Leave, StagePlace
from pipeloom.split.planned.stand_ins import Format, shaped_like_result, zeros_like

_RESULT = "="  # in front of a module's name: its result, which another stage reads


class ForwardRun:
    """One forward of a stage.

    Args:
        place: of the stage.
        inputs: keyword arguments of the model.
        arrived: the message of the previous stage; empty on the first.
        sends: keys of the values that later stages need; None: unknown, so this forward finds them.
        formats: returns the dtype that the model's parameters had, and the one that they have now.

    Attributes:
        draws: draws alike on all stages what the forward draws between its parts, inside its block.
        origins: follows values, in the first forward of a form of inputs.
        found: the values that later stages need: arguments of parts, "part|place", and results of modules, "=module".
        done: own parts that have run.
        result: of the last own part.
    """

    def __init__(
        self,
        place: StagePlace,
        inputs: dict[str, Any],
        arrived: Mapping[str, Any],
        sends: Sequence[str] | None,
        formats: Callable[[], tuple[Format, Format]],
    ) -> None:
        self.inputs, self.arrived, self._formats = inputs, arrived, formats
        self.origins = Origins() if sends is None else None
        self.found: dict[str, Any] = {}
        self.done: list[int] = []
        self.result: Any = None
        self._place, self._sends = place, sends or ()
        self._extras = all_of(arrived.get("extras", {}), arrived.get("same", {}))
        self._passed: set[str] = set()
        self._entries: dict[str, dict[Any, Any]] = {k: dict(v) for k, v in arrived.get("entries", {}).items()}
        self._collected: dict[str, Any] = {}
        self._kept: KeptBuffers | None = None  # before the exploration
        self._forms: dict[str, Any] = {}  # of what blocks of other stages return, by list
        self._left: Any = None  # the last own result, as the rest of the forward gets it
        self._received: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id of zeros -> these, and what a part got in their place
        results = {key.removeprefix(_RESULT): value for key, value in self._extras.items() if key.startswith(_RESULT)}
        if place.before is not None and "value" in arrived:
            results[place.before] = arrived["value"]
        self.draws = SharedDraws(arrived.get("seed"), self.origins)
        if sends is None:
            assert self.origins is not None
            self.origins.mark([value for name, value in arrived.items() if name != "inputs"], OWN)
        else:
            self.found = {_RESULT + name: value for name, value in results.items() if _RESULT + name in sends}

    def message(self) -> dict[str, Any]:
        """What the next stage receives."""
        missing = [key for key in self._sends if key not in self.found]
        if missing:
            raise self._place.not_found(missing[0].removeprefix(_RESULT))
        extras, same = each_once(self.found)
        message: dict[str, Any] = {"value": self.result, "inputs": self.inputs}
        optional = {
            "extras": extras,
            "same": same,
            "entries": self._entries,
            "collected": self._collected,
            "seed": self.draws.seed,
        }
        return message | {name: value for name, value in optional.items() if value}

    @property
    def explores(self) -> bool:
        """Whether all own parts have run, and the rest of the forward only shows what later stages need."""
        place = self._place
        return self.origins is not None and len(self.done) == len(place.names) and place.last != place.end

    def add_results_in(self, value: Any) -> None:
        """Send the results known here that are combined in a value of a later stage."""
        assert self.origins is not None
        self._add_results(self.origins.of(value))

    def _add_results(self, origins: int) -> None:
        assert self.origins is not None
        for name, result in self.origins.results_in(origins).items():
            if name != self._place.names[-1]:  # the next stage gets it anyway
                self.found[_RESULT + name] = result

    def finished(self, output: Any) -> Any:
        """What the model returns, where its forward came to its end.

        Raises:
            SplitError: some part did not run, or the result follows from zeros.
        """
        place = self._place
        if len(self.done) != len(place.names) or place.last != place.end:
            missing = next((n for i, n in enumerate(place.names) if i not in self.done), place.names[-1])
            raise place.not_called(missing)
        if self._received:  # such as an encoder's result, which a decoder's parts read and the model returns too
            output = tree_map_only(Tensor, lambda t: self._received.get(id(t), (t, t))[1], output)
        if self.origins is not None:
            if self.origins.of(output) & EARLIER:
                raise place.reads_earlier()
            self._check_decisions()
        return output

    def end_exploration(self) -> None:
        """Undo changes of buffers by the rest of the forward, and send the results that it branches on."""
        assert self.origins is not None
        self._add_results(self.origins.decided)
        if self._kept is not None:
            self._kept.restore()

    @property
    def decides(self) -> bool:
        """Whether the next forward may need other values: it branches on what parts computed, or on what it draws."""
        return self.origins is not None and (self.origins.decided != 0 or self.draws.others)

    def _check_decisions(self) -> None:
        if self.origins is not None and self.origins.decided & EARLIER:
            raise self._place.decides_by_earlier()

    # Parts of the stage

    def run_part(
        self,
        index: int,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        settings: dict[str, Any],
        stage: Any,
    ) -> Any:
        """Run a part: `layer`, with the arguments of the model's call, as far as they are not those of zeros.

        Raises:
            Leave: it was the last part, and nothing else is to be found.
        """
        place, name = self._place, self._place.names[index]
        if index in self.done or (self.done and index < self.done[-1]):
            raise place.in_another_order(name)
        if self._extras:
            prefix = f"{name}|"
            given = {k.removeprefix(prefix): v for k, v in self._extras.items() if k.startswith(prefix)}
            if given:
                zeros = {where: tensor for where, tensor in tensors_of(args, settings) if where in given}
                self._received.update({id(tensor): (tensor, given[where]) for where, tensor in zeros.items()})
                args, settings = with_tensors(args, settings, given)
        containers = containers_of(args, settings)
        if containers and index == 0:
            self._fill(containers)
        before = {where: entries_of(container) for where, container in containers.items()} if containers else {}
        origins = self.origins
        if origins is not None:
            origins.check_arguments(name, args, settings)
            self._check_decisions()
            origins.quiet = True
        with self.draws.paused():
            result = layer(*args, **settings)
        self.done.append(index)
        for where, container in containers.items():
            for entry, value in entries_of(container).items():
                if before[where].get(entry) is not value:
                    self._entries.setdefault(where, {})[entry] = value
        ends = place.first + index == place.last < place.end
        if origins is not None:
            origins.quiet = False
        if _RESULT + name in self._sends:
            self.found[_RESULT + name] = result
        if ends:
            self.result = result
            found = collector()
            self._collected = {} if found is None else collected_outputs(found)
            for key in self._sends:
                parameter = None if key in self.found else stage.own_parameter(key.removeprefix(_RESULT))
                if parameter is not None:  # which the forward reads behind the last part
                    self.found[key] = parameter.view_as(parameter)
            if origins is None and len(self.found) == len(self._sends):
                raise Leave(stage)
            if origins is not None:
                self._kept = KeptBuffers(stage.outer_buffers())
        self._left = self._given(name, result, LAST if ends else OWN)
        return self._left

    def _given(self, name: str, result: Any, origin: int) -> Any:
        """What the forward gets of a module's result: a copy where the result is sent, since it may go on in place."""
        if self.origins is None and result is not self.result and _RESULT + name not in self._sends:
            return result
        given = tree_map_only(Tensor, Tensor.clone, result)
        if self.origins is not None:
            self.origins.replace(given, origin)
            if not self.origins.has_result(name):
                self.origins.add_result(name, result, given)
        return given

    def run_other(
        self, name: str, module: Any, args: tuple[Any, ...], settings: dict[str, Any], *, everywhere: bool
    ) -> Any:
        """Run a module that is no part. What follows from inputs alone need not be sent, if every stage computes it."""
        key = _RESULT + name
        if key in self._extras:
            return self._given(name, self._extras[key], OWN)
        origins = self.origins
        if origins is None:
            with self.draws.within(name):
                result = module(*args, **settings)
            if key in self._sends and key not in self.found:
                self.found[key] = result
                return self._given(name, result, 0)
            return result
        has_parameters = next(module.parameters(), None) is not None
        given = origins.of((args, settings)) if has_parameters else 0
        origins.quiet = has_parameters
        with self.draws.within(name):
            result = module(*args, **settings)
        origins.quiet = False
        if has_parameters:
            own = OWN if self._place.blocks & set(self._place.names) and not everywhere else 0
            origins.mark(result, given if given & ~(DRAWN | IN_UNIT) else given | own)
        known = origins.of(result)
        if known & (OWN | LAST) and not known & (LATER | EARLIER) and not origins.has_result(name):
            return self._given(name, result, known & (OWN | LAST))  # and not what it was computed of
        return result

    def read_own(self, key: str, tensor: Tensor) -> Tensor:
        """A parameter of a module that not every stage has, which the forward reads from outside of the module."""
        if _RESULT + key in self._sends:
            self.found[_RESULT + key] = tensor.view_as(tensor)
        if self.origins is not None and not self.origins.has_result(key):
            self.origins.mark(tensor, OWN)
            self.origins.add_result(key, tensor.view_as(tensor), tensor)
        return tensor

    def read_absent(self, key: str, tensor: Tensor) -> Tensor:
        """What stands for a tensor of a module of another stage: the received one, or zeros without memory."""
        received = self._extras.get(_RESULT + key)
        if isinstance(received, Tensor):
            return received if self.origins is None else self._given(key, received, OWN)
        before, now = self._formats()
        device = next((leaf.device for leaf in tree_leaves(self.inputs) if isinstance(leaf, Tensor)), None)
        dtype = now if now is not None and tensor.dtype == before else tensor.dtype
        zeros = torch.zeros((), dtype=dtype, device=device).expand(tensor.shape)
        if self.origins is not None:
            self.origins.mark(zeros, EARLIER)
        return zeros

    def _fill(self, containers: Mapping[str, Any]) -> None:
        """Add the entries that parts of earlier stages left in dicts and lists among their arguments."""
        for place, entries in self.arrived.get("entries", {}).items():
            container = containers.get(place)
            if isinstance(container, MutableMapping):
                container.update(entries)
            elif isinstance(container, list):
                container[:] = [entries[index] for index in sorted(entries)]

    # Parts of other stages

    def pass_other(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a module returns that is no part, and is on other stages: what arrived, or zeros."""
        received = self._extras.get(_RESULT + name)
        return self.zeros(twin, args, settings, EARLIER) if received is None else self._given(name, received, OWN)

    def pass_earlier(self, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a part of an earlier stage returns: what arrived, or zeros."""
        if self.done or name in self._passed:
            raise self._place.in_another_order(name)
        self._passed.add(name)
        if name == self._place.before:
            found = collector()
            if found is not None:
                for key, values in self.arrived.get("collected", {}).items():
                    found[key] = list(values)
            return self._given(name, self.arrived["value"], OWN)
        if _RESULT + name in self._extras:
            return self._given(name, self._extras[_RESULT + name], OWN)
        return self._absent(name, twin, (args, settings), EARLIER)

    def pass_later(
        self, place: int, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], stage: object
    ) -> Any:
        """Where a part of a later stage is called: keeps what it reads and is sent, and returns zeros.

        Raises:
            Leave: nothing else is to be found.
        """
        here, origins = self._place, self.origins
        if len(self.done) < len(here.names):
            raise here.in_another_order(name)
        for where, tensor in tensors_of(args, settings):
            key = f"{name}|{where}"
            wanted = key in (self._sends if origins is None else self._extras)
            if origins is not None and not wanted:
                origin = origins.of_tensor(tensor)
                wanted = bool(origin & OWN) or (bool(origin & LAST) and place > here.last + 1)
                if origin & LATER:
                    self.add_results_in(tensor)
                wanted = wanted and not origin & (LATER | EARLIER)
            if wanted:
                self.found[key] = self._extras.get(key, tensor)
        if origins is None:
            if place == here.end or len(self.found) == len(self._sends):
                raise Leave(stage)
        elif not here.combines and (place == here.end or place > here.last_block):
            raise Leave(stage)  # heads: their arguments follow from the result of the last block
        return self._absent(name, twin, (args, settings), LATER)

    def _absent(self, name: str, twin: Any, call: tuple[tuple[Any, ...], dict[str, Any]], origin: int) -> Any:
        """Zeros for what a part of another stage returns; blocks of one list return values of one form."""
        here, (args, settings) = self._place, call
        if name not in here.blocks:
            return self.zeros(twin, args, settings, origin)
        siblings = here.list_of(name)
        if siblings not in self._forms:
            like, form = (here.names[-1], self._left) if origin == LATER else (here.before, self.arrived["value"])
            one_list = not here.combines or (like is not None and here.list_of(like) == siblings)
            if one_list or settings.get("past_key_values") is not None:
                self._forms[siblings] = form if origin == LATER else zeros_like(form)
            else:
                self._forms[siblings] = self.zeros(twin, args, settings, origin)
        form = self._forms[siblings]
        return form if self.origins is None else self._marked(form, origin)

    def zeros(self, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], origin: int) -> Any:
        """Zeros in the shapes of what a module of another stage returns."""
        if self.origins is None:
            return shaped_like_result(twin, args, settings, self._formats())
        self.origins.quiet = True
        try:
            result = shaped_like_result(twin, args, settings, self._formats())
        except Exception as error:
            if self.explores:
                raise
            raise self._place.without_shape(type(twin).__name__, error) from error
        self.origins.quiet = False
        self.origins.mark(result, origin)
        return result

    def _marked(self, value: Any, origin: int) -> Any:
        """Zeros in the form of a value."""
        if self.origins is None:
            return zeros_like(value)
        self.origins.quiet = True
        result = zeros_like(value)
        self.origins.quiet = False
        self.origins.mark(result, origin)
        return result
