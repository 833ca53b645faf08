"""`ForwardRun`: one forward of a planned stage: what happens where the model calls its parts, and how it ends."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import NoneType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.errors import SplitError
from pipeloom.split.planned.collected import collected_outputs, collector
from pipeloom.split.planned.origins import EARLIER, LAST, LATER, OWN, Origins, tensors_of, with_tensors
from pipeloom.split.planned.place import StagePlace
from pipeloom.split.planned.stand_ins import Format, shaped_like_result, zeros_like

_CONTAINERS = (MutableMapping, list)
_UNCHANGED = (Tensor, NoneType, bool, int, tuple)  # asked first: the other question is slow


class Leave(BaseException):
    """Ends the forward of a stage behind its last part. Not an Exception, so that no model catches it."""

    def __init__(self, stage: object) -> None:
        super().__init__()
        self.stage = stage


class ForwardRun:
    """One forward of a stage.

    Args:
        place: of the stage.
        inputs: keyword arguments of the model.
        arrived: the message of the previous stage; empty on the first.
        sends: places of the values that later stages need, "part|place"; None: unknown, so this forward finds them.
        formats: returns the dtype that the model's parameters had, and the one that they have now.

    Attributes:
        origins: follows values, in the first forward of a form of inputs.
        found: the values that later stages need.
        done, passed: own parts that have run, earlier parts that were passed over.
        result: of the last own part.
        entries: what parts left in dicts and lists among their arguments, by the argument's place and by entry.
        collected: what transformers' hooks collected.
        placeholder: zeros in the form of the received value.
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
        self.origins: Origins | None = None
        self.found: dict[str, Tensor] = {}
        self.done: list[int] = []
        self.result: Any = None
        self._place, self._sends = place, sends or ()
        self._extras: Mapping[str, Tensor] = arrived.get("extras", {})
        self._passed: set[str] = set()
        self._entries: dict[str, dict[Any, Any]] = {k: dict(v) for k, v in arrived.get("entries", {}).items()}
        self._collected: dict[str, Any] = {}
        self._placeholder: Any = None
        self._received: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id of zeros -> these, and what a part got in their place
        if sends is None:
            self.origins = Origins()
            self.origins.mark([value for name, value in arrived.items() if name != "inputs"], OWN)

    def message(self) -> dict[str, Any]:
        """What the next stage receives."""
        message: dict[str, Any] = {"value": self.result, "inputs": self.inputs}
        optional = {"extras": self.found, "entries": self._entries, "collected": self._collected}
        return message | {name: value for name, value in optional.items() if value}

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
        if self.origins is not None and self.origins.of(output) & EARLIER:
            raise place.reads_earlier()
        return output

    # Parts of the stage

    def run_part(
        self, index: int, layer: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any], stage: object
    ) -> Any:
        """Run a part: `layer`, with the arguments of the model's call, as far as they are not those of zeros.

        Raises:
            Leave: it was the last part, and nothing else is to be found.
        """
        place, name = self._place, self._place.names[index]
        if index in self.done or (self.done and index < self.done[-1]):
            raise place.in_another_order(name)
        self.done.append(index)
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
            _check_arguments(origins, name, args, settings)
            origins.quiet = True
        result = layer(*args, **settings)
        for where, container in containers.items():
            for entry, value in entries_of(container).items():
                if before[where].get(entry) is not value:
                    self._entries.setdefault(where, {})[entry] = value
        ends = place.first + index == place.last < place.end
        if origins is not None:
            origins.quiet = False
            origins.replace(result, LAST if ends else OWN)
        if ends:
            self.result = result
            found = collector()
            self._collected = {} if found is None else collected_outputs(found)
            if origins is None and not self._sends:
                raise Leave(stage)
        return result

    def run_other(self, module: Any, args: tuple[Any, ...], settings: dict[str, Any], *, everywhere: bool) -> Any:
        """Run a module that is no part. What follows from inputs alone need not be sent, if every stage computes it."""
        origins = self.origins
        if origins is None or next(module.parameters(), None) is None:
            return module(*args, **settings)
        given, origins.quiet = origins.of((args, settings)), True
        result = module(*args, **settings)
        origins.quiet = False
        own = OWN if self._place.blocks & set(self._place.names) and not everywhere else 0
        origins.mark(result, given or own)
        return result

    def _fill(self, containers: Mapping[str, Any]) -> None:
        """Add the entries that parts of earlier stages left in dicts and lists among their arguments."""
        for place, entries in self.arrived.get("entries", {}).items():
            container = containers.get(place)
            if isinstance(container, MutableMapping):
                container.update(entries)
            elif isinstance(container, list):
                container[:] = [entries[index] for index in sorted(entries)]

    # Parts of other stages

    def pass_earlier(self, place: int, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """What a part of an earlier stage returns: the last of them what arrived, others zeros."""
        if self.done or name in self._passed:
            raise self._place.in_another_order(name)
        self._passed.add(name)
        if place == self._place.first - 1:
            found = collector()
            if found is not None:
                for key, values in self.arrived.get("collected", {}).items():
                    found[key] = list(values)
            return self.arrived["value"]
        if name not in self._place.blocks:
            return self.zeros(twin, args, settings, EARLIER)
        if self._placeholder is None:
            self._placeholder = self._marked(self.arrived["value"], EARLIER)
        return self._placeholder

    def pass_later(
        self, place: int, name: str, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], stage: object
    ) -> Any:
        """Where a part of a later stage is called: keeps what it reads and is sent, and returns zeros.

        Raises:
            Leave: nothing else is to be found.
        """
        here, origins = self._place, self.origins
        for where, tensor in tensors_of(args, settings):
            key = f"{name}|{where}"
            if origins is None:
                wanted = key in self._sends
            else:
                origin = origins.of_tensor(tensor)
                computed = bool(origin & OWN) or (bool(origin & LAST) and place > here.last + 1)
                wanted = (key in self._extras or computed) and not origin & LATER
            if wanted:
                self.found[key] = self._extras.get(key, tensor)
        if place == here.end or (origins is None and len(self.found) == len(self._sends)):
            raise Leave(stage)
        if name in here.blocks:
            return self.result if origins is None else self._marked(self.result, LATER)
        if origins is not None and place > here.last_block:
            raise Leave(stage)  # heads: their arguments follow from the result of the last block
        return self.zeros(twin, args, settings, LATER)

    def zeros(self, twin: Any, args: tuple[Any, ...], settings: dict[str, Any], origin: int) -> Any:
        """Zeros in the shapes of what a module of another stage returns."""
        if self.origins is None:
            return shaped_like_result(twin, args, settings, self._formats())
        self.origins.quiet = True
        result = shaped_like_result(twin, args, settings, self._formats())
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


def _check_arguments(origins: Origins, name: str, args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    for place, tensor in tensors_of(args, settings):
        if origins.of_tensor(tensor) & EARLIER:
            raise SplitError(
                f"{name!r} reads argument {place!r}, which combines what several earlier stages compute: stages "
                "cannot exchange it. Use one stage, or a cut that keeps these parts together."
            )


def containers_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dicts and lists among the arguments of a call, which its module may change."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, _UNCHANGED) and isinstance(value, _CONTAINERS):
            found[name] = value
    for index, value in enumerate(args):
        if not isinstance(value, _UNCHANGED) and isinstance(value, _CONTAINERS):
            found[str(index)] = value
    return found


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a dict or list that hold tensors."""
    items = container.items() if isinstance(container, MutableMapping) else enumerate(container)
    return {
        key: value
        for key, value in items
        if isinstance(key, str | int) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }
