"""`ForwardRun`: one forward of a planned stage: what happens where the model calls its parts, and how it ends."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.errors import SplitError
from pipeloom.split.planned.collected import collected_outputs, collector
from pipeloom.split.planned.containers import (
    all_of,
    classes_of,
    containers_of,
    each_once,
    entries_of,
    views_of,
    with_classes,
)
from pipeloom.split.planned.forward.known import RESULT, Known
from pipeloom.split.planned.place import Leave, StagePlace
from pipeloom.split.planned.tracking.decisions import DecisionWatch
from pipeloom.split.planned.tracking.draws import SharedDraws
from pipeloom.split.planned.tracking.forms import ResultForms
from pipeloom.split.planned.tracking.origins import LAST, OWN, Origins, tensors_of, with_tensors
from pipeloom.split.stage_module import running


class ForwardRun:
    """One forward of a stage, which knows what later stages need of it; an `Exploration` finds that out.

    Args:
        stage: runs it.
        place: of the stage.
        inputs: keyword arguments of the model.
        arrived: the message of the previous stage; empty on the first.
        known: of this form of inputs.
        lasting: the first own part that leaves something behind, so it cannot run twice: a block, or one with buffers.
        draws: whether the forward is known to draw between its parts.
        around: returns a part with what runs around it, such as recomputation; None: parts are called directly.

    Attributes:
        draws: draws alike on all stages what the forward draws between its parts; None: it is known to draw nothing.
        origins: follows values, in an exploration.
        found: the values that later stages need: arguments of parts, "part|place", and results of modules, "=module".
        done: own parts that have run.
        result: of the last own part.
        left: the last own result, as the rest of the forward gets it.
        entries: values that parts up to here left in dicts and lists among their arguments, by argument.
        plain: own parts that only run; of the others, arguments or results may belong to other stages.
        has_taken: whether the forward has got what arrived from the part before the stage.
        inside: the own part that runs, in an exploration.
        called_inside: own parts, and the first module inside of each that the forward has called itself.
        calls: the number of calls of modules that are no parts.
        thread: attributes of `running` in this thread, looked up once.
    """

    # Most forwards are short, and change little of this: what is set here need not be set in each.
    draws: SharedDraws | None = None
    origins: Origins | None = None
    watch: DecisionWatch | None = None
    result: Any = None
    left: Any = None
    extras: Mapping[str, Any] = {}
    has_taken = _has_given = False
    inside: str | None = None
    _collected: Mapping[str, Any] = {}

    def __init__(
        self,
        stage: Any,
        place: StagePlace,
        inputs: dict[str, Any],
        arrived: Mapping[str, Any],
        known: Known,
        lasting: int,
        draws: bool,
        around: Callable[[int, Any], Callable[..., Any]] | None,
    ) -> None:
        self.stage, self.place, self.inputs = stage, place, inputs
        self.known, self.sends, self.plain = known, known.sends, known.plain
        self._lasting, self._around = lasting, around
        self.found: dict[str, Any] = {}
        self.done: list[int] = []
        self.entries: dict[str, dict[Any, Any]] = {}
        self._received: dict[int, tuple[Tensor, Tensor]] = {}  # id of zeros -> these, and what a part got for them
        self.called_inside: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.thread = vars(running)
        self.arrived = arrived
        if arrived:
            self._take_arrived()
        self._filled = "entries" not in arrived
        if draws:
            self.draws = SharedDraws(arrived.get("seed"), self.origins, is_alone=place.is_alone)
        if known.decisions:
            self.watch = DecisionWatch(known.decisions)
        if draws or around is not None or self.extras:
            self.plain = frozenset()

    def _take_arrived(self) -> None:
        """Take what the previous stage sends, and pass on what later stages need of it."""
        if "classes" in self.arrived:
            self.arrived = with_classes(self.arrived, self.arrived["classes"])
        arrived, sends = self.arrived, self.sends
        self.extras = all_of(arrived.get("extras", {}), arrived.get("same", {}))
        self.entries = {k: dict(v) for k, v in arrived.get("entries", {}).items()}
        if sends:
            results = {key: value for key, value in self.extras.items() if key.startswith(RESULT)}
            if self.place.before is not None and "value" in arrived:
                results[RESULT + self.place.before] = arrived["value"]
            self.found = {key: value for key, value in results.items() if key in sends}

    @cached_property
    def forms(self) -> ResultForms:
        """The forms of results of parts."""
        return ResultForms(self.arrived)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block, draws are those of all stages, and decisions are compared with the known ones."""
        with self.draws or nullcontext(), self.watch or nullcontext():
            yield

    @property
    def seed(self) -> int | None:
        """The seed of draws between parts, on this stage and earlier ones; None: nothing was drawn."""
        seed: int | None = self.arrived.get("seed") if self.draws is None else self.draws.seed
        return seed

    def message(self) -> dict[str, Any]:
        """What the next stage receives."""
        missing = [key for key in self.sends if key not in self.found]
        if missing:
            raise self.place.not_found(missing[0].removeprefix(RESULT))
        extras, same = each_once(self.found)
        message: dict[str, Any] = {"value": self.result, "inputs": self.inputs}
        optional = {
            "extras": extras,
            "same": same,
            "entries": self.entries,
            "collected": self._collected,
            "forms": self.forms.text(list(self.place.places)[: self.place.first], self.result),
            "seed": self.seed,
            "aliases": self.aliases,
            "classes": classes_of({"value": self.result, "extras": extras}),
        }
        return message | {name: value for name, value in optional.items() if value}

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """Results of modules, and the earlier ones in whose memory each lies."""
        return {**self.arrived.get("aliases", {}), **self.known.aliases}

    @property
    def is_past_own(self) -> bool:
        """Whether all own parts have run, and the rest of the forward only has, or shows, what later stages need."""
        place = self.place
        return len(self.done) == len(place.names) and place.last != place.end

    @property
    def has_only_zeros(self) -> bool:
        """Whether the forward has got nothing yet of what arrived: zeros stand for results of earlier stages."""
        return bool(self.place.first) and not self.has_taken and not self._has_given

    @property
    def explores(self) -> bool:
        """Whether the rest of the forward only shows what later stages need."""
        return False

    def leave_if_complete(self) -> None:
        """Raises Leave where the forward has found all that later stages need."""
        if self.is_past_own and len(self.found) == len(self.sends):
            raise Leave(self.stage)

    def finished(self, output: Any) -> Any:
        """What the model returns, where its forward came to its end.

        Raises:
            SplitError: some part did not run, or the result follows from zeros.
        """
        place = self.place
        if len(self.done) != len(place.names) or place.last != place.end:
            self.check_whole()
            raise place.not_called(place.names[-1])
        if self._received:  # such as an encoder's result, which a decoder's parts read and the model returns too
            output = tree_map_only(Tensor, lambda t: self._received.get(id(t), (t, t))[1], output)
        return output

    def check_whole(self) -> None:
        """Raises SplitError where the forward did not call all parts of the stage, and the part before them."""
        before = self.place.before
        if len(self.done) == len(self.place.names) and (before is None or self.has_taken):
            return
        missing = self._missing()
        if missing is not None and missing in self.called_inside:
            raise self.place.calls_inside(missing, self.called_inside[missing])
        raise self.place.not_called(missing or str(before))

    # Parts of the stage

    def run_part(self, index: int, layer: Any, args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Run a part: `layer`, with the arguments of the model's call, as far as they are not those of zeros.

        Raises:
            Leave: it was the last part, and nothing else is to be found.
        """
        place, name = self.place, self.place.names[index]
        if self.done and index <= self.done[-1]:
            raise self.in_another_order(name)
        self.thread["layer"] = layer
        if index == self._lasting:
            self._begin_lasting()
        run = layer if self._around is None else self._around(index, layer)
        if self.extras:
            prefix = f"{name}|"
            given = {k.removeprefix(prefix): v for k, v in self.extras.items() if k.startswith(prefix)}
            if given:
                zeros = {where: tensor for where, tensor in tensors_of(args, settings) if where in given}
                self._received.update({id(tensor): (tensor, given[where]) for where, tensor in zeros.items()})
                args, settings = with_tensors(args, settings, given)
        containers = containers_of(args, settings)
        if index == 0 and not self._filled:
            self.fill(containers)
            if not self._filled:
                raise place.loses_entries(name)
        before = {where: entries_of(container) for where, container in containers.items()} if containers else {}
        result = self._call(name, run, args, settings)
        self.done.append(index)
        for where, container in containers.items():
            for entry, value in entries_of(container).items():
                if before[where].get(entry) is not value:
                    self.entries.setdefault(where, {})[entry] = value
        if RESULT + name in self.sends:
            self.found[RESULT + name] = result
        ends = place.first + index == place.last < place.end
        if place.last < place.end:
            self.forms.add(name, result)
        if ends:
            self._end(result)
        self.left = self.given(name, result, LAST if ends else OWN)
        return self.left

    def _begin_lasting(self) -> None:
        """From here on, the forward cannot begin again."""
        if self.watch is not None:
            self.watch.end()

    def _call(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Call the part `name`."""
        if self.draws is None:
            return run(*args, **settings)
        with self.draws.paused():
            return run(*args, **settings)

    def tensors_in_entries(self) -> set[int]:
        """The identities of the tensors that parts up to here left in dicts and lists, which travel by themselves."""
        return {id(leaf) for leaf in tree_leaves(list(self.entries.values())) if isinstance(leaf, Tensor)}

    def _end(self, result: Any) -> None:
        """Keep the last part's result, and leave the forward unless it explores.

        Raises:
            Leave: nothing else is to be found.
        """
        self.result = result
        found = collector()
        self._collected = {} if found is None else collected_outputs(found)
        for key in self.sends:
            value = None if key in self.found else self.stage.own_value(key.removeprefix(RESULT))
            if value is not None:  # which the forward reads behind the last part
                self.found[key] = views_of(value)
        self._end_own()

    def _end_own(self) -> None:
        """Leave the forward, unless later stages need something else of it."""
        if len(self.found) == len(self.sends):
            raise Leave(self.stage)

    def given(self, name: str, result: Any, origin: int) -> Any:
        """What the forward gets of a module's result: a copy where the result is sent, since it may go on in place.

        Args:
            name: of the module.
            result: of it.
            origin: of the result, in an exploration.
        """
        self._has_given = True
        if result is not self.result and RESULT + name not in self.sends:
            return result
        return tree_map_only(Tensor, Tensor.clone, result)

    def in_another_order(self, name: str) -> SplitError:
        """The error for a part that runs twice, or in another order."""
        missing = self._missing()
        inside = None if missing is None else self.called_inside.get(missing)
        return self.place.in_another_order(name) if inside is None else self.place.calls_inside(str(missing), inside)

    def _missing(self) -> str | None:
        """The first own part that has not run."""
        return next((name for index, name in enumerate(self.place.names) if index not in self.done), None)

    def fill(self, containers: Mapping[str, Any]) -> None:
        """Add the entries that parts of earlier stages left in dicts and lists among their arguments."""
        entries_of_all = self.arrived["entries"]
        if not entries_of_all.keys() <= containers.keys():
            return
        for place, entries in entries_of_all.items():
            container = containers[place]
            if isinstance(container, MutableMapping):
                container.update(entries)
            elif isinstance(container, list):
                container[:] = [entries[index] for index in sorted(entries)]
        self._filled = True
