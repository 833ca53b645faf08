"""What a forward reads of its inputs into Python, such as whether a mask has padding: it may branch on that.

Which values later stages need is known of forwards that read the same (`Known.decisions`). `DecisionWatch` follows the
others up to the first part that leaves something behind, where a forward that reads something else can still begin
again. Forwards that read more behind it are explored each time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

TO_PYTHON = frozenset(
    (
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
        *("item", "tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"),
    )
)
_SHAPED_BY_VALUES = frozenset(
    ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave", "bincount")
)
_MAYBE_SHAPED = frozenset(("__getitem__", "where", "one_hot", "arange"))
ANY = object()  # in place of a decision that does not matter


class OtherDecision(BaseException):
    """Ends a forward that has read something else of its inputs than the one it follows. Not an Exception, as `Leave`.

    Attributes:
        seen: what it has read.
    """

    def __init__(self, seen: tuple[Any, ...]) -> None:
        super().__init__()
        self.seen = seen


def decision_of(name: str, args: Sequence[Any], settings: Mapping[str, Any], result: Any) -> Any:
    """What a call of one of torch's functions tells Python about the values of its arguments; None: nothing.

    Args:
        name: of the function.
    """
    if name in TO_PYTHON:
        if isinstance(result, bool | int | float | complex):
            return result
        return result.tobytes() if hasattr(result, "tobytes") else repr(result)
    if name in _SHAPED_BY_VALUES or (name in _MAYBE_SHAPED and _is_shaped_by_values(name, args, settings)):
        first = result[0] if isinstance(result, tuple) else result
        return tuple(first.shape) if isinstance(first, Tensor) else None
    return None


def _is_shaped_by_values(name: str, args: Sequence[Any], settings: Mapping[str, Any]) -> bool:
    """Whether the shape of what a function of `_MAYBE_SHAPED` returns follows from values of its arguments."""
    if name == "__getitem__":
        index = args[1] if len(args) > 1 else None
        return any(map(_selects, index if isinstance(index, tuple) else (index,)))
    if name == "arange":
        return any(isinstance(each, Tensor) for each in (*args, *settings.values()))
    if name == "one_hot":
        return bool((*args[1:2], settings.get("num_classes", -1))[0] == -1)
    return len(args) + len(settings) == 1  # the places where a condition holds


def _selects(index: Any) -> bool:
    """Whether an index is a mask, or a slice that a tensor bounds."""
    if isinstance(index, slice):
        return any(isinstance(each, Tensor) for each in (index.start, index.stop, index.step))
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


class DecisionWatch(TorchFunctionMode):
    """Inside the block, what a forward reads is compared with what an explored one has read.

    Args:
        expected: what that one has read, before `end`.

    Raises:
        OtherDecision: where they differ.
    """

    def __init__(self, expected: tuple[Any, ...]) -> None:
        super().__init__()
        self._expected, self._count, self._active = expected, 0, False
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state() if torch.cuda._initialized else None

    def __enter__(self) -> "DecisionWatch":
        self._active = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        if self._active:
            self._active = False
            super().__exit__(*error)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Watch no more. Where a mode of the model's own is inside of this one, its functions only pass through."""
        self._count = len(self._expected)
        if self._active and _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)

    def restore_draws(self) -> None:
        """Set torch's generators back to where the forward began."""
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = kwargs or {}
        result = func(*args, **settings)
        if self._count == len(self._expected):
            return result
        found = decision_of(getattr(func, "__name__", ""), args, settings, result)
        if found is not None:
            expected = self._expected[self._count]
            if expected is not ANY and found != expected:
                raise OtherDecision((*self._expected[: self._count], found))
            self._count += 1
        return result
