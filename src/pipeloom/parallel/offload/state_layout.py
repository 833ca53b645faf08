"""The states that an optimizer keeps per parameter, found before its first step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError, one_line

_ALIGNMENT_BYTES = 64
_NUM_PROBES = 2  # steps: some optimizers make states in the second


class StateEntry(NamedTuple):
    """One state of one parameter in a portion's region.

    Attributes:
        key: the optimizer's name of the state.
        shape, stride, dtype: of the tensor, which is dense.
        offset, num_bytes: its place in the region.
    """

    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    num_bytes: int

    def shifted(self, num_bytes: int) -> StateEntry:
        """The same entry, `num_bytes` further on."""
        return self._replace(offset=self.offset + num_bytes)

    def fits(self, value: Any) -> bool:
        """Whether a value has this entry's shape and dtype."""
        return isinstance(value, Tensor) and (tuple(value.shape), value.dtype) == (self.shape, self.dtype)

    def view(self, region: Tensor) -> Tensor:
        """The state as a view of the bytes of its region."""
        values = region[self.offset : self.offset + self.num_bytes].view(self.dtype)
        return values.as_strided(self.shape, self.stride)


class Layouts:
    """The layouts of an optimizer's states, for any optimizer: two steps of a copy of it on zeros show its states.

    Args:
        optimizer: it is not changed.
        least_bytes: smaller states are left out.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, least_bytes: int) -> None:
        self._optimizer = optimizer
        self._least_bytes = least_bytes
        self._known: dict[Any, tuple[tuple[StateEntry, ...], int]] = {}

    def of(self, parameter: nn.Parameter, group: int) -> tuple[tuple[StateEntry, ...], int]:
        """The states of a parameter in a group, in order, and their bytes.

        Raises:
            InputError: a step on zeros fails, or the optimizer keeps state in its groups.
        """
        kind = (group, parameter.shape, parameter.stride(), parameter.dtype, parameter.device)
        if kind not in self._known:
            self._known[kind] = self._lay_out(self._probe(parameter, self._optimizer.param_groups[group]))
        return self._known[kind]

    def _probe(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> Mapping[str, Any]:
        if not parameter.numel() or not parameter.requires_grad:
            return {}
        name = type(self._optimizer).__name__
        twin = nn.Parameter(torch.zeros_like(parameter, memory_format=torch.preserve_format))
        twin.grad = torch.zeros_like(twin, memory_format=torch.preserve_format)
        options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        probe = copy.copy(self._optimizer)  # without hooks
        vars(probe).update({key: value for key, value in vars(self._optimizer).items() if key not in vars(probe)})
        probe.state = defaultdict(dict)
        probe.param_groups = [{**options, "params": [twin]}]
        try:
            for _ in range(_NUM_PROBES):
                probe.step()
        except Exception as error:
            raise InputError(
                f"{name} cannot be stepped with one parameter of shape {list(parameter.shape)} and a gradient of zeros "
                f"({one_line(error)}): its states cannot be offloaded. Use another optimizer, or do not offload states."
            ) from error
        if any(repr(probe.param_groups[0].get(key)) != repr(value) for key, value in options.items()):
            raise InputError(
                f"{name} keeps state in its parameter groups, which does not work with offloaded states: they are "
                "updated in portions. Use another optimizer, or do not offload states."
            )
        found: Mapping[str, Any] = probe.state[twin]
        return found

    def _lay_out(self, state: Mapping[str, Any]) -> tuple[tuple[StateEntry, ...], int]:
        entries, end = [], 0
        for key, value in state.items():
            if not isinstance(value, Tensor) or value.nbytes < self._least_bytes or not _is_dense(value):
                continue
            entries.append(StateEntry(key, tuple(value.shape), value.stride(), value.dtype, end, value.nbytes))
            end += -(-value.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return tuple(entries), end


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is dense, in any order of dimensions."""
    if tensor.layout is not torch.strided:
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True
