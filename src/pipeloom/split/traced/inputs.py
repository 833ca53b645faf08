"""The inputs of a traced model: how a batch is bound to the arguments of its forward, and what the trace holds for."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_structure

from pipeloom.errors import InputError, SplitError, folded, listed


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Signature:
    """Binds examples and batches to the arguments of a model's forward.

    Args:
        model: the model.
        example: ``(args, kwargs)``, a tuple of arguments, a dict of keyword arguments, or the only argument.

    Attributes:
        example: its arguments.

    Raises:
        SplitError: the example does not fit the forward, or has no tensor.
    """

    def __init__(self, model: nn.Module, example: Any) -> None:
        self._signature = inspect.signature(model.forward)
        self._single: type | None = None  # of the only argument
        try:
            self.example = self.bind(example)
        except TypeError as error:
            raise SplitError(
                f"example={folded(example)}: {error}. Pass (args, kwargs) as the model's forward takes them."
            ) from None
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.example)):
            raise SplitError(f"example={folded(example)}: holds no tensor. Pass inputs of one micro-batch.")
        args, kwargs = self.example
        if len(args) == 1 and not kwargs:
            self._single = type(args[0])
        self._order = list(kwargs)

    def bind(self, value: Any) -> Arguments:
        """The arguments that a batch stands for; the same for positional and keyword arguments of one name.

        Raises:
            TypeError: the forward does not take them.
        """
        if self._single in (tuple, list, dict) and isinstance(value, self._single) and not self._is_named(value):
            bound = self._signature.bind(value)
        elif isinstance(value, tuple) and tuple(map(type, value)) == (tuple, dict):
            bound = self._signature.bind(*value[0], **value[1])
        elif isinstance(value, dict):
            is_only = len(self._signature.parameters) == 1 and not self._is_named(value)
            bound = self._signature.bind(value) if is_only else self._signature.bind(**value)
        elif isinstance(value, tuple):
            bound = self._signature.bind(*value)
        else:
            bound = self._signature.bind(value)
        return Arguments(bound.args, bound.kwargs)

    def _is_named(self, value: Any) -> bool:
        """Whether a value is a dict of keyword arguments, and not the only argument, which is a dict itself."""
        kinds = {each.kind for each in self._signature.parameters.values()}
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        return isinstance(value, dict) and (takes_any or value.keys() == self._signature.parameters.keys())

    def by_name(self, arguments: Arguments) -> dict[str, Any]:
        """Arguments by the names of the forward."""
        return dict(self._signature.bind(*arguments.args, **arguments.kwargs).arguments)

    def leaves(self, value: Any) -> tuple[list[Any], TreeSpec]:
        """The tensors and constants of a batch in the order of the trace, and their structure."""
        args, kwargs = self.bind(value)
        known = [name for name in getattr(self, "_order", ()) if name in kwargs]
        kwargs = {name: kwargs[name] for name in [*known, *(name for name in kwargs if name not in known)]}
        return tree_flatten((args, kwargs))


class InputRules:
    """What the inputs must be for a trace to hold.

    Args:
        signature: of the model.
        traced: per leaf of the example, a tensor whose dynamic sizes are symbols, or a constant.
        names: of the leaves.
        guards: conditions on sizes, as torch.export writes them.
    """

    def __init__(
        self, signature: Signature, traced: Sequence[Any], names: Sequence[str], guards: Sequence[str]
    ) -> None:
        self.signature, self._names = signature, names
        _, self._spec = signature.leaves((signature.example.args, signature.example.kwargs))
        self._leaves = [
            (tuple(int(n) if isinstance(n, int) else None for n in leaf.shape), leaf.dtype)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in traced
        ]
        self._guards = [(text, compile(text, "<guard>", "eval")) for text in guards]
        self._passed: set[Any] = set()

    def check(self, value: Any) -> list[Any]:
        """The leaves of a micro-batch.

        Raises:
            InputError: the trace does not hold for it.
        """
        try:
            leaves, spec = self.signature.leaves(value)
        except TypeError as error:
            raise InputError(f"inputs: {error}. Pass the arguments of the example that was traced.") from None
        key = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        if (key, spec) in self._passed:
            return leaves
        if spec != self._spec:
            raise InputError(self._of_another_structure(value))
        for name, leaf, known in zip(self._names, leaves, self._leaves, strict=True):
            self._check_leaf(name, leaf, known)
        self._check_guards(value)
        self._passed.add((key, spec))
        return leaves

    def _of_another_structure(self, value: Any) -> str:
        """The error text for a batch with other arguments than the example."""
        given = self.signature.by_name(self.signature.bind(value))
        traced = self.signature.by_name(self.signature.example)
        missing, added = (
            [repr(name) for name in names if name not in others] for names, others in ((traced, given), (given, traced))
        )
        if missing or added:
            seen = [f"lack {listed(missing)}" if missing else "", f"have {listed(added)} too" if added else ""]
            return (
                f"inputs {' and '.join(filter(None, seen))}: the example that was traced has "
                f"{listed(map(repr, traced))}. Pass the same arguments, or trace an example with these."
            )
        name = next((name for name in given if tree_structure(given[name]) != tree_structure(traced[name])), None)
        return (
            f"input {name!r} has another nesting than in the example that was traced: must be equal. Pass the same "
            "tuples, lists and dicts, or trace an example with these."
        )

    def _check_leaf(self, name: str, leaf: Any, known: Any) -> None:
        if not isinstance(known, tuple) or not isinstance(leaf, Tensor):
            if isinstance(leaf, Tensor) or isinstance(known, tuple) or leaf != known:
                seen = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else folded(leaf)
                raise InputError(f"input {name!r} is {seen}: the trace holds for another kind or value. Trace it anew.")
            return
        shape, dtype = known
        fits = len(shape) == leaf.dim() and all(n in (None, m) for n, m in zip(shape, leaf.shape, strict=True))
        if not fits or leaf.dtype != dtype:
            wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
            raise InputError(
                f"input {name!r} is a {leaf.dtype} tensor of shape {list(leaf.shape)}: the trace holds for {dtype} of "
                f"shape {wanted}. Pass such a tensor, or trace an example of this shape."
            )

    def fixed_batch(self) -> str | None:
        """A condition that fails for every other batch size than the example's; None: there is none."""
        size = self._traced_samples()
        broken = [self._broken(_resized(self.signature.example, n)) for n in (size + 1, size + 2, 2 * size + 3)]
        return broken[0] if all(broken) else None

    def _traced_samples(self) -> int:
        """The number of samples of the trace, which is 2 for an example of one."""
        return max(2, _num_samples(self.signature.example))

    def _check_guards(self, value: Any) -> None:
        text = self._broken(value)
        if text is None:
            return
        seen, traced = _num_samples(value), self._traced_samples()
        enough = next((n for n in range(seen, traced + 1) if self._broken(_resized(value, n)) is None), seen)
        if enough > seen:
            raise InputError(
                f"a micro-batch has {seen} sample{'s' * (seen != 1)}, and the traced example has {traced}, for which "
                f"{text}: the model may compute something else where this does not hold. Use micro-batches of at least "
                f"{enough} samples, or name the model's layers with layers= in place of example=."
            )
        raise InputError(
            f"inputs do not fulfil {text}: the traced example does, and the model may compute something else "
            "where it does not hold. Pass inputs of such sizes, or trace an example of these."
        )

    def _broken(self, value: Any) -> str | None:
        """The first condition that a batch breaks."""
        scope = {"L": self.signature.by_name(self.signature.bind(value)), "torch": torch}
        for text, code in self._guards:
            try:
                held = bool(eval(code, scope))  # a condition that torch.export wrote
            except Exception:
                held = True  # about values that a batch does not have
            if not held:
                return text
        return None


def _num_samples(value: Any) -> int:
    """The samples of a batch that was traced: the size of its first tensor along dimension 0."""
    return next(leaf.shape[0] for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _resized(value: Any, num_samples: int) -> Any:
    """A batch of the same sizes but another number of samples, without values."""

    def resized(leaf: Any) -> Any:
        return leaf.new_empty((num_samples, *leaf.shape[1:]), device="meta") if isinstance(leaf, Tensor) else leaf

    return tree_map(resized, value)
