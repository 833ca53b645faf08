"""What a planned stage knows of forwards: which values later stages need, by the form of inputs (`KnownForwards`)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Self

from pipeloom.split.planned.place import StagePlace

RESULT = "="  # in front of a module's name: its result, which another stage reads
_MOST_WAYS = 8  # of forwards with inputs of one form; those that go yet another way are explored each time


class Known(NamedTuple):
    """What the first forward of a form of inputs has found.

    Attributes:
        sends: keys of the values that later stages need.
        plain: own parts that only run: nothing of them is sent, and the forward goes on behind them.
        decisions: what it has read of its inputs into Python.
        aliases: results of modules, and the earlier ones in whose memory each lies.
    """

    sends: tuple[str, ...] = ()
    plain: frozenset[int] = frozenset()
    decisions: tuple[Any, ...] = ()
    aliases: Mapping[str, Sequence[str]] = {}

    @classmethod
    def of(
        cls,
        place: StagePlace,
        sends: tuple[str, ...],
        decisions: tuple[Any, ...],
        lasting: int,
        unlike: Collection[str] = (),
        aliases: Mapping[str, Sequence[str]] | None = None,
    ) -> Self:
        """Knowledge of a stage at `place`, whose own part `lasting` is the first that leaves something behind.

        The forms of the results of `unlike` parts are sent.
        """
        ends = place.last - place.first if place.last < place.end else None
        kept = {ends, lasting} if decisions else {ends}

        def stays(name: str) -> bool:
            return RESULT + name in sends or name in unlike

        plain = (i for i, name in enumerate(place.names) if i not in kept and not stays(name))
        return cls(sends, frozenset(plain), decisions, aliases or {})


class KnownForwards:
    """The known forwards of a stage, by the form of their inputs."""

    def __init__(self) -> None:
        self._ways: dict[Any, list[Known]] = {}  # the last used first
        self._drawing: set[Any] = set()

    def clear(self) -> None:
        """Forget all: forwards may go other ways now."""
        self._ways.clear()
        self._drawing.clear()

    def last_used(self, form: Any) -> Known | None:
        """What the last forward with inputs of this form was; None: unknown."""
        ways = self._ways.get(form)
        return ways[0] if ways else None

    def begins_with(self, form: Any, decisions: tuple[Any, ...]) -> Known | None:
        """The forward with inputs of this form that begins with these decisions; None: unknown."""
        ways = self._ways.get(form, ())
        return next((known for known in ways if known.decisions[: len(decisions)] == decisions), None)

    def used(self, form: Any, known: Known) -> None:
        """Note that a known forward is the last used one."""
        ways = self._ways[form]
        if known is not ways[0]:
            self._ways[form] = [known, *(each for each in ways if each is not known)]

    def add(self, form: Any, known: Known) -> None:
        """Add a forward, as the last used one, unless there are too many for this form of inputs."""
        ways = self._ways.setdefault(form, [])
        if len(ways) < _MOST_WAYS:
            ways.insert(0, known)

    def draws(self, form: Any) -> bool:
        """Whether a forward with inputs of this form has drawn between its parts."""
        return bool(self._drawing) and form in self._drawing

    def add_drawing(self, form: Any) -> None:
        """Note that forwards with inputs of this form draw between their parts."""
        self._drawing.add(form)
