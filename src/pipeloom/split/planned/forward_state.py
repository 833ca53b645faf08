"""What one forward of a `PlannedStage` holds, and how it ends."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeloom.split.planned.origins import Origins
from pipeloom.split.stage_module import BlockRunner


class Leave(BaseException):
    """Ends the forward of a stage behind its last part. Not an Exception, so that no model catches it."""

    def __init__(self, stage: object) -> None:
        super().__init__()
        self.stage = stage


class Forward:
    """One forward of a stage.

    Attributes:
        run: runs blocks, as for `StageModule.forward`.
        inputs: keyword arguments of the model.
        arrived: the message of the previous stage; empty on the first.
        origins: follows values, in the first forward of a form of inputs.
        sends: places of the values that later stages need, "part|place".
        found: these values.
        done, passed: own parts that have run, earlier parts that were passed over.
        result: of the last own part.
        entries: what parts left in dicts and lists among their arguments, by the argument's place and by entry.
        collected: what transformers' hooks collected.
        placeholder: zeros in the form of the received value.
    """

    def __init__(self, run: BlockRunner | None, inputs: dict[str, Any], arrived: Mapping[str, Any]) -> None:
        self.run, self.inputs, self.arrived = run, inputs, arrived
        self.extras: Mapping[str, Tensor] = arrived.get("extras", {})
        self.origins: Origins | None = None
        self.sends: Sequence[str] = ()
        self.found: dict[str, Tensor] = {}
        self.done: list[int] = []
        self.passed: set[str] = set()
        self.result: Any = None
        self.entries: dict[str, dict[Any, Any]] = {k: dict(v) for k, v in arrived.get("entries", {}).items()}
        self.collected: dict[str, Any] = {}
        self.placeholder: Any = None


def containers_of(args: tuple[Any, ...], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dicts and lists among the arguments of a call, which its module may change."""
    named = (*((str(index), value) for index, value in enumerate(args)), *settings.items())
    return {name: value for name, value in named if isinstance(value, MutableMapping | list)}


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a dict or list that hold tensors."""
    items = container.items() if isinstance(container, MutableMapping) else enumerate(container)
    return {
        key: value
        for key, value in items
        if isinstance(key, str | int) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }
