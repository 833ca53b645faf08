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
        *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero"),
    )
)
_SHAPED_BY_VALUES = frozenset(
    ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave")
)


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
    index = args[1] if name == "__getitem__" and len(args) > 1 else None
    masks = index if isinstance(index, tuple) else (index,)
    by_mask = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in masks)
    if by_mask or name in _SHAPED_BY_VALUES:
        first = result[0] if isinstance(result, tuple) else result
        return tuple(first.shape) if isinstance(first, Tensor) else None
    return None


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
