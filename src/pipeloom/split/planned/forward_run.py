"""`ForwardRun`: one forward of a planned stage: what happens where the model calls its parts, and how it ends."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.common.overlaps import share_storage
from pipeloom.errors import SplitError
from pipeloom.split.planned.attributes import KeptBuffers
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
from pipeloom.split.planned.known import RESULT, Known
from pipeloom.split.planned.place import Leave, StagePlace
from pipeloom.split.planned.tracking.decisions import DecisionWatch
from pipeloom.split.planned.tracking.draws import SharedDraws
from pipeloom.split.planned.tracking.forms import ResultForms
from pipeloom.split.planned.tracking.memory import ResultMemory
from pipeloom.split.planned.tracking.origins import (
    EARLIER,
    LAST,
    LATER,
    OWN,
    Origins,
    tensors_of,
    versions_of,
    with_tensors,
)
from pipeloom.split.planned.tracking.own_rules import OwnRules, function_around
from pipeloom.split.planned.tracking.types import TypeWatch
from pipeloom.split.stage_module import running


class ForwardRun:
    """One forward of a stage.

    Args:
        stage: runs it.
        place: of the stage.
        inputs: keyword arguments of the model.
        arrived: the message of the previous stage; empty on the first.
        known: of this form of inputs; None: unknown, so this forward finds what later stages need.
        lasting: the first own part that leaves something behind, so it cannot run twice: a block, or one with buffers.
        draws: whether the forward is known to draw between its parts.
        around: returns a part with what runs around it, such as recomputation; None: parts are called directly.

    Attributes:
        draws: draws alike on all stages what the forward draws between its parts; None: it is known to draw nothing.
        origins: follows values, in the first forward of a form of inputs.
        found: the values that later stages need: arguments of parts, "part|place", and results of modules, "=module".
        done: own parts that have run.
        result: of the last own part.
        entries: values that parts up to here left in dicts and lists among their arguments, by argument.
        plain: own parts that only run; of the others, arguments or results may belong to other stages.
        has_taken: whether the forward has got what arrived from the part before the stage.
        inside: the own part that runs, in a forward that explores.
        called_inside: own parts, and the first module inside of each that the forward has called itself.
        calls: the number of calls of modules that are no parts.
        thread: attributes of `running` in this thread, looked up once.
    """

    def __init__(
        self,
        stage: Any,
        place: StagePlace,
        inputs: dict[str, Any],
        arrived: Mapping[str, Any],
        known: Known | None,
        lasting: int,
        draws: bool,
        around: Callable[[int, Any], Callable[..., Any]] | None,
    ) -> None:
        if "classes" in arrived:
            arrived = with_classes(arrived, arrived["classes"])
        self.inputs, self.arrived = inputs, arrived
        self.origins = Origins() if known is None else None
        self._types = TypeWatch() if known is None else None
        self._memory = ResultMemory(arrived.get("aliases", {}))
        self.found: dict[str, Any] = {}
        self.done: list[int] = []
        self.result: Any = None
        self.draws = None
        if draws or known is None:
            self.draws = SharedDraws(arrived.get("seed"), self.origins, is_alone=place.is_alone)
        self.stage, self.place, self._around = stage, place, around
        self.extras: dict[str, Any] = {}
        self.entries: dict[str, dict[Any, Any]] = {}
        self._filled = "entries" not in arrived
        self._collected: dict[str, Any] = {}
        self._kept: KeptBuffers | None = None  # before the exploration
        self.forms = ResultForms(arrived)
        self.left: Any = None  # the last own result, as the rest of the forward gets it
        self._received: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id of zeros -> these, and what a part got in their place
        self.sends, self.plain, decisions, aliases = known or Known()
        self._memory.aliases |= aliases
        self._rules = OwnRules()
        self.watch = DecisionWatch(decisions) if decisions else None
        self._lasting, self._early = lasting, 0  # decisions by inputs before that part
        self._early_decisions: tuple[Any, ...] = ()
        self.has_taken = self._has_given = False
        self.inside: str | None = None
        self.called_inside: dict[str, str] = {}
        self.calls: dict[str, int] = {}
        self.thread = vars(running)
        if arrived:
            self._take_arrived()
        if self.extras or self.draws is not None or around is not None:
            self.plain = frozenset()
        if self.origins is not None:
            self.origins.on_change, self.origins.on_hook = self._changed_by_forward, self._hooked_by_forward
            self.origins.mark([value for name, value in arrived.items() if name != "inputs"], OWN)
            self.origins.mark_given(inputs)
            if not arrived:
                self.origins.whole_graphs = None
            elif arrived.keys() <= {"value", "inputs", "seed", "classes", "aliases"}:
                self.origins.whole_graphs = frozenset((str(place.before), *place.names))

    def _take_arrived(self) -> None:
        """Take what the previous stage sends, and pass on what later stages need of it."""
        arrived, sends = self.arrived, self.sends
        self.extras = all_of(arrived.get("extras", {}), arrived.get("same", {}))
        self.entries = {k: dict(v) for k, v in arrived.get("entries", {}).items()}
        if sends:
            results = {key: value for key, value in self.extras.items() if key.startswith(RESULT)}
            if self.place.before is not None and "value" in arrived:
                results[RESULT + self.place.before] = arrived["value"]
            self.found = {key: value for key, value in results.items() if key in sends}

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block, origins of values are followed where they are unknown, and draws are those of all stages."""
        types = nullcontext() if self._types is None else self._types.watching()
        with self.origins or nullcontext(), self.draws or nullcontext(), self.watch or nullcontext(), types:
            try:
                yield
            finally:
                if self._types is not None and self._types.found is not None:
                    raise self.place.asks_type(self._types.found)

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
    def aliases(self) -> dict[str, Sequence[str]]:
        """Results of modules, and the earlier ones in whose memory each lies."""
        return self._memory.aliases

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
        return self.origins is not None and self.is_past_own

    def leave_if_complete(self) -> None:
        """Raises Leave where a known forward has found all that later stages need."""
        if self.origins is None and self.is_past_own and len(self.found) == len(self.sends):
            raise Leave(self.stage)

    def add_results_in(self, value: Any) -> None:
        """Send the results known here that are combined in a value of a later stage."""
        assert self.origins is not None
        self._add_results(self.origins.of(value))

    def _add_results(self, origins: int) -> None:
        assert self.origins is not None
        for name, result in self.origins.results_in(origins).items():
            if name != self.place.names[-1]:  # the next stage gets it anyway
                self.found[RESULT + name] = result

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
        if self.origins is not None:
            self.check_current(output)
            if self.origins.of(output) & EARLIER:
                raise place.reads_earlier(self.origins.absent_in(self.origins.of(output)))
            self._check_decisions()
            self._check_memory()
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

    def end_exploration(self) -> None:
        """Undo changes of buffers by the rest of the forward, and send the results that it branches on."""
        assert self.origins is not None
        self._add_results(self.origins.decided)
        self._check_memory()
        if self._kept is not None:
            self._kept.restore()

    @property
    def decides(self) -> bool:
        """Whether the next forward may need other values: it branches on what parts computed, on what it draws, or,
        where it cannot begin again, on its inputs; or it computes gradients, which are followed in every forward.
        """
        if self.origins is None:
            return False
        drawn = self.draws is not None and self.draws.others
        late = self._lasting in self.done and self.origins.given_decisions > self._early
        return self.origins.decided != 0 or self.origins.differentiates or drawn or late

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What an explored forward has read while it could begin again; empty: nothing of its inputs."""
        assert self.origins is not None
        if self._lasting in self.done:
            return self._early_decisions
        return tuple(self.origins.decisions) if self.origins.given_decisions else ()

    def _check_decisions(self) -> None:
        if self.origins is not None and self.origins.decided & EARLIER:
            raise self.place.decides_by_earlier(self.origins.absent_in(self.origins.decided))

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
            if self.watch is not None:
                self.watch.end()
            if self.origins is not None:
                self._early = self.origins.given_decisions
                self._early_decisions = tuple(self.origins.decisions) if self._early else ()
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
        origins = self.origins
        versions: list[tuple[str, Tensor, int]] = []
        shared: list[Tensor] = []
        if origins is not None:
            around = None if place.is_alone else function_around()
            if around is not None:
                raise place.inside_function(name, around)
            self.check_current((args, settings))
            self._rules.read((args, settings))
            combined = origins.argument_of_earlier(args, settings)
            if combined is not None:
                raise place.argument_of_earlier(name, combined[0], origins.absent_in(combined[1]))
            self._check_decisions()
            entries = self.tensors_in_entries()
            versions = [each for each in versions_of(args, settings) if id(each[1]) not in entries]
            shared = self.stage.shared_tensors(name)
            origins.quiet, self.inside = True, name
        if self.draws is None:
            result = run(*args, **settings)
        else:
            with self.draws.paused(), nullcontext() if self._types is None else self._types.watching(False):
                result = run(*args, **settings)
        self.done.append(index)
        if origins is not None:
            origins.quiet, self.inside = False, None
            self._check_changes(name, versions, result)
            known = {id(tensor) for tensor in shared}
            if any(id(tensor) not in known for tensor in self.stage.shared_tensors(name)):
                raise place.shares_attribute(name)
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

    def tensors_in_entries(self) -> set[int]:
        """The identities of the tensors that parts up to here left in dicts and lists, which travel by themselves."""
        return {id(leaf) for leaf in tree_leaves(list(self.entries.values())) if isinstance(leaf, Tensor)}

    def _check_changes(self, name: str, versions: Sequence[tuple[str, Tensor, int]], result: Any) -> None:
        """Raises SplitError where a part has changed an argument in place that it does not return."""
        returned = {id(leaf) for leaf in tree_leaves(result)}
        for where, tensor, version in versions:
            if tensor._version == version or not self.place.elsewhere:
                continue
            if id(tensor) not in returned:
                raise self.place.changes_argument(name, where)
            self._change(repr(name), tensor, of_all=False)

    def _change(self, by: str, tensor: Tensor, *, of_all: bool) -> None:
        """A tensor is changed in place, in a forward that explores; see `ResultMemory.change`."""
        assert self.origins is not None
        self._memory.change(by, tensor, of_all=of_all)
        self.origins.watches = self.check_current if self._memory.stale else None

    def _changed_by_forward(self, tensor: Tensor) -> None:
        self._change(f"the forward of {self.place.model}", tensor, of_all=True)

    def _hooked_by_forward(self, tensor: Tensor) -> None:
        """The forward registers a hook on a tensor, outside of all parts."""
        assert self.origins is not None
        origins = self.origins.of(tensor)
        if not origins & (LATER | EARLIER):
            self._rules.found |= dict.fromkeys(self.origins.results_in(origins), "a hook of a tensor")

    @property
    def shared_rule(self) -> tuple[str, str] | None:
        """A gradient rule of the model's own that later stages apply too, and the module whose result it follows."""
        rules = self._rules.found.items()
        return next(((rule, name) for name, rule in rules if RESULT + name in self.found), None)

    def check_current(self, value: Any) -> None:
        """Raises SplitError for a value that something changes in place, of which this stage has a copy."""
        for stale, by, name in self._memory.stale:
            if any(isinstance(leaf, Tensor) and share_storage(leaf, stale) for leaf in tree_leaves(value)):
                raise self.place.changes_copied(by, name)

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
        if self.origins is not None:
            self._kept = KeptBuffers(self.stage.outer_buffers())
        elif len(self.found) == len(self.sends):
            raise Leave(self.stage)

    def given(self, name: str, result: Any, origin: int) -> Any:
        """What the forward gets of a module's result: a copy where the result is sent, since it may go on in place."""
        self._has_given = True
        if self.origins is None and result is not self.result and RESULT + name not in self.sends:
            return result
        given = tree_map_only(Tensor, Tensor.clone, result)
        if self.origins is not None:
            self.origins.replace(given, origin)
            self._rules.begin(name, given)
            self._memory.add(name, result, given)
            if not self.origins.has_result(name):
                self.origins.add_result(name, result, given)
        return given

    def _check_memory(self) -> None:
        """Raises SplitError where a part has changed a result in place that stages exchange as it was before."""
        for name, part in self._memory.changed.items():
            if RESULT + name in self.found or RESULT + name in self.extras:
                raise self.place.changes_result(part, name)

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
