"""`Exploration`: the first forward of a form of inputs, which finds the values that later stages need."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeloom.common.overlaps import share_storage
from pipeloom.split.planned.attributes import KeptBuffers
from pipeloom.split.planned.forward.forward_run import ForwardRun
from pipeloom.split.planned.forward.known import RESULT, Known
from pipeloom.split.planned.place import StagePlace
from pipeloom.split.planned.tracking.memory import ResultMemory
from pipeloom.split.planned.tracking.origins import EARLIER, LATER, OWN, Origins, versions_of
from pipeloom.split.planned.tracking.own_rules import OwnRules, function_around
from pipeloom.split.planned.tracking.types import TypeWatch


class Exploration(ForwardRun):
    """One forward of a stage in which values are followed from parts to parts.

    Args:
        stage, place, inputs, arrived, lasting, around: see `ForwardRun`.
    """

    origins: Origins

    def __init__(
        self,
        stage: Any,
        place: StagePlace,
        inputs: dict[str, Any],
        arrived: Mapping[str, Any],
        lasting: int,
        around: Callable[[int, Any], Callable[..., Any]] | None,
    ) -> None:
        self.origins = Origins()
        super().__init__(stage, place, inputs, arrived, Known(), lasting, draws=True, around=around)
        arrived = self.arrived
        self._types, self._rules = TypeWatch(), OwnRules()
        self._memory = ResultMemory(arrived.get("aliases", {}))
        self._kept: KeptBuffers | None = None  # from the last own part on
        self._early = 0  # decisions by inputs before the part that lasts
        self._early_decisions: tuple[Any, ...] = ()
        self.origins.on_change, self.origins.on_hook = self._changed_by_forward, self._hooked_by_forward
        self.origins.mark([value for name, value in arrived.items() if name != "inputs"], OWN)
        self.origins.mark_given(inputs)
        if not arrived:
            self.origins.whole_graphs = None
        elif arrived.keys() <= {"value", "inputs", "seed", "classes", "aliases"}:
            self.origins.whole_graphs = frozenset((str(place.before), *place.names))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """In the block, origins of values are followed, and draws are those of all stages."""
        with self.origins, super().followed(), self._types.watching():
            try:
                yield
            finally:
                if self._types.found is not None:
                    raise self.place.asks_type(self._types.found)

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """Results of modules, and the earlier ones in whose memory each lies."""
        return self._memory.aliases

    @property
    def explores(self) -> bool:
        """Whether the rest of the forward only shows what later stages need."""
        return self.is_past_own

    def leave_if_complete(self) -> None:
        """Go on: what later stages need is not known yet."""

    def add_results_in(self, value: Any) -> None:
        """Send the results known here that are combined in a value of a later stage."""
        self._add_results(self.origins.of(value))

    def _add_results(self, origins: int) -> None:
        for name, result in self.origins.results_in(origins).items():
            if name != self.place.names[-1]:  # the next stage gets it anyway
                self.found[RESULT + name] = result

    def finished(self, output: Any) -> Any:
        """What the model returns, where its forward came to its end.

        Raises:
            SplitError: some part did not run, or the result follows from zeros.
        """
        output = super().finished(output)
        self.check_current(output)
        if self.origins.of(output) & EARLIER:
            raise self.place.reads_earlier(self.origins.absent_in(self.origins.of(output)))
        self._check_decisions()
        self._check_memory()
        return output

    def end(self) -> None:
        """Undo changes of buffers by the rest of the forward, and send the results that it branches on."""
        self._add_results(self.origins.decided)
        self._check_memory()
        if self._kept is not None:
            self._kept.restore()

    @property
    def decides(self) -> bool:
        """Whether the next forward may need other values: it branches on what parts computed, on what it draws, or,
        where it cannot begin again, on its inputs; or it computes gradients, which are followed in every forward.
        """
        drawn = self.draws is not None and self.draws.others
        late = self._lasting in self.done and self.origins.given_decisions > self._early
        return self.origins.decided != 0 or self.origins.differentiates or drawn or late

    @property
    def decisions(self) -> tuple[Any, ...]:
        """What the forward has read while it could begin again; empty: nothing of its inputs."""
        if self._lasting in self.done:
            return self._early_decisions
        return tuple(self.origins.decisions) if self.origins.given_decisions else ()

    def _check_decisions(self) -> None:
        if self.origins.decided & EARLIER:
            raise self.place.decides_by_earlier(self.origins.absent_in(self.origins.decided))

    def _begin_lasting(self) -> None:
        """From here on, the forward cannot begin again."""
        self._early = self.origins.given_decisions
        self._early_decisions = tuple(self.origins.decisions) if self._early else ()

    def _call(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        """Call the part `name`, with checks of what it reads and changes."""
        place, origins = self.place, self.origins
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
        shared = {id(tensor): tensor for tensor in self.stage.shared_tensors(name)}
        origins.quiet, self.inside = True, name
        with self._types.watching(False):
            result = super()._call(name, run, args, settings)
        origins.quiet, self.inside = False, None
        self._check_changes(name, versions, result)
        if any(id(tensor) not in shared for tensor in self.stage.shared_tensors(name)):
            raise place.shares_attribute(name)
        return result

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
        self._memory.change(by, tensor, of_all=of_all)
        self.origins.watches = self.check_current if self._memory.stale else None

    def _changed_by_forward(self, tensor: Tensor) -> None:
        self._change(f"the forward of {self.place.model}", tensor, of_all=True)

    def _hooked_by_forward(self, tensor: Tensor) -> None:
        """The forward registers a hook on a tensor, outside of all parts."""
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

    def _end_own(self) -> None:
        """Let the rest of the forward show what later stages need."""
        self._kept = KeptBuffers(self.stage.outer_buffers())

    def given(self, name: str, result: Any, origin: int) -> Any:
        """What the forward gets of a module's result: a copy of that origin."""
        self._has_given = True
        given = tree_map_only(Tensor, Tensor.clone, result)
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
