"""`StateCopies`: the last two states of one process, in memory that outlives it.

    memory 0   | seal | length | first |   | JSON | tensors, each aligned to 64 bytes |     state after step 20
    memory 1   | seal | length |           | JSON | tensors                           |     state after step 10

The launcher made the memory, and holds it (`pipeloom.processes.recovery`). A seal is the step + 1; it is 0 while a copy
is written, so that a process that is killed meanwhile leaves the other copy. Content is that of a checkpoint.
"""

import json
import mmap
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from pipeloom.errors import RunError
from pipeloom.processes.elastic.copy_head import BEGUN as _BEGUN
from pipeloom.processes.elastic.copy_head import FIRST as _FIRST
from pipeloom.processes.elastic.copy_head import HEAD_BYTES as _HEAD_BYTES
from pipeloom.processes.elastic.copy_head import LENGTH as _LENGTH
from pipeloom.processes.elastic.copy_head import SEAL as _SEAL
from pipeloom.train.checkpoint.state import OptimizerState, RandomState, like, name_of, unwrapped
from pipeloom.train.elastic.held_parts import held_parts

# More numbers of a head: when the run last began or completed a step, in memory 0; `StateCopies.recovery` of a copy.
_TIME, _RECOVERY = 4, 5
_ALIGNMENT_BYTES = 64


class StateCopy:
    """A copy of this process's state; it reads like a checkpoint whose layout is that of the run.

    Attributes:
        step: after which it was made.
        state, layout: as `checkpoint.save` got them.
        parts: which parts of the tensors these are; see `held_parts`.
        row: the metrics of `step`, if the copy was made before they were surely written; else empty.
    """

    def __init__(self, step: int, text: str, memory: Tensor) -> None:
        found = json.loads(text)
        self.step, self.state, self.layout = step, found["state"], found["layout"]
        self.parts, self.row = found["parts"], found["row"]
        self._random_values, self._optimizer = found["random"], OptimizerState(**found["optimizer"])
        self._tensors: dict[tuple[str, ...], Tensor] = {}
        for path, dtype, shape, start in found["tensors"]:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            self._tensors[tuple(path)] = memory[start : start + size].view(kind).view(shape)

    def with_random(self, random: RandomState) -> Self:
        """This copy, with other states of the generators; it is changed in place."""
        kept = {path: tensor for path, tensor in self._tensors.items() if path[0] != "random"}
        self._tensors = kept | {("random", name): tensor for name, tensor in random.tensors.items()}
        self._random_values = random.values
        return self

    def load_model(self, tensors: Mapping[str, Tensor], *_: Any, **__: Any) -> None:
        """Copy the values into `tensors` in place."""
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(self._tensors["model", name])

    def load_optimizer(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str], *_: Any, **__: Any) -> None:
        """Restore the state and the options of `optimizer`."""
        optimizer = unwrapped(optimizer)
        for group, saved in zip(optimizer.param_groups, self._optimizer.groups, strict=True):
            on_device = bool(saved["options"].get("capturable") or saved["options"].get("fused"))
            for parameter in group["params"]:
                name = name_of(parameter, names)
                state: dict[str, Any] = dict(self._optimizer.values.get(name, {}))
                for key in self._optimizer.tensors.get(name, {}):
                    # torch keeps the step count on the CPU, except for capturable and fused optimizers.
                    device = parameter.device if key != "step" or on_device else torch.device("cpu")
                    state[key] = self._tensors["optimizer", name, key].to(device, copy=True)
                if state:
                    optimizer.state[parameter] = state
                else:
                    optimizer.state.pop(parameter, None)
            for key, value in saved["options"].items():
                group[key] = like(group.get(key), value)

    @property
    def model(self) -> dict[str, Tensor]:
        """The model's tensors by name."""
        return {path[1]: tensor for path, tensor in self._tensors.items() if path[0] == "model"}

    @property
    def optimizer(self) -> OptimizerState:
        """The optimizer's state by name."""
        found = OptimizerState(
            self._optimizer.optimizer_class, values=self._optimizer.values, groups=self._optimizer.groups
        )
        for path, tensor in self._tensors.items():
            if path[0] == "optimizer":
                found.tensors.setdefault(path[1], {})[path[2]] = tensor
        return found

    def random(self, rank: int, size: int) -> RandomState:
        """The generator states of this process."""
        tensors = {path[1]: tensor.clone() for path, tensor in self._tensors.items() if path[0] == "random"}
        return RandomState(tensors, self._random_values)


class StateCopies:
    """The copies of one process.

    Args:
        descriptors: of the memory of each copy; files of any size.

    Attributes:
        recovery: the number of the last recovery of the run, which its copies from now on have.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._memories = [_Memory(descriptor) for descriptor in descriptors]
        self._arriving, self.recovery = self._memories[0], 0

    @property
    def steps(self) -> list[int]:
        """The steps after which the complete copies were made."""
        return sorted(self.made)

    @property
    def made(self) -> dict[int, int]:
        """The steps after which the complete copies were made, and the number of the last recovery before each."""
        heads = [memory.head for memory in self._memories]
        return {head[_SEAL] - 1: head[_RECOVERY] for head in heads if head[_SEAL]}

    @property
    def first_step(self) -> int | None:
        """After which step the run began, once it has its output directory; kept in the same memory."""
        found = self._memories[0].head[_FIRST]
        return found - 1 if found else None

    def begin(self, step: int) -> None:
        """The run has its output directory, and begins after `step`, unless it has begun before."""
        self._memories[0].head[_FIRST] = self._memories[0].head[_FIRST] or step + 1

    @property
    def begun(self) -> int:
        """The last step that the run has begun, as far as it was noted; 0: none."""
        return self._memories[0].head[_BEGUN]

    @property
    def begun_at(self) -> float:
        """When the run last began or completed a step (time.monotonic, seconds)."""
        return self._memories[0].head[_TIME] / 1e9

    def note_begun(self, step: int) -> None:
        """A step of the run begins, now."""
        self._memories[0].head[_BEGUN] = step
        self.note_time()

    def note_time(self) -> None:
        """A step of the run begins or is complete, now."""
        self._memories[0].head[_TIME] = time.monotonic_ns()

    def write(self, step: int, contents: Mapping[str, Any]) -> None:
        """Copy a state, in place of the older copy.

        Args:
            step: the last one that is complete.
            contents: as `checkpoint.save` takes them.

        Raises:
            RunError: there is not enough memory.
        """
        tensors = dict(_tensors(contents))
        places, end = list[tuple[tuple[str, ...], str, list[int], int]](), 0
        for path, tensor in tensors.items():
            places.append((path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        optimizer = contents["optimizer"]
        text = json.dumps(
            {
                "state": contents["state"],
                "layout": contents["layout"],
                "parts": held_parts(contents),
                "row": contents.get("row", {}),
                "random": contents["random"].values,
                "optimizer": {
                    **{key: getattr(optimizer, key) for key in ("optimizer_class", "values", "groups")},
                    "tensors": {name: dict.fromkeys(found) for name, found in optimizer.tensors.items()},
                },
                "tensors": places,
            }
        ).encode()
        memory = min(self._memories, key=lambda each: (each.head[_SEAL] != step + 1, each.head[_SEAL]))
        memory.head[_SEAL] = 0
        room = memory.open(len(text), end)
        for (_, _, _, start), tensor in zip(places, tensors.values(), strict=True):
            size = tensor.numel() * tensor.element_size()
            room[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
        memory.write_text(text)
        memory.head[_RECOVERY] = self.recovery
        memory.head[_SEAL] = step + 1

    def read(self, step: int) -> StateCopy:
        """The copy made after `step`, which is one of `steps`."""
        return StateCopy(step, *self._of(step).read())

    def head(self, step: int) -> list[int]:
        """Of a copy: bytes of its text and of its tensors for `open`, and the recovery for `seal`."""
        memory = self._of(step)
        return [memory.head[_LENGTH], len(memory.read()[1]), memory.head[_RECOVERY]]

    def packed(self, step: int) -> Tensor:
        """A copy as uint8 numbers."""
        return self._of(step).packed()

    def open(self, text_bytes: int, tensor_bytes: int) -> Tensor:
        """The place for a `packed` copy that arrives, instead of the older copy; `seal` makes it a copy."""
        self._arriving = min(self._memories, key=lambda each: each.head[_SEAL])
        self._arriving.head[_SEAL] = 0
        room = self._arriving.open(text_bytes, tensor_bytes)
        return self._arriving.packed()[: room.storage_offset() - _HEAD_BYTES + len(room)]

    def seal(self, step: int, recovery: int) -> None:
        """What has arrived is a copy of the state after `step`, made after that recovery."""
        for memory in self._memories:
            if memory.head[_SEAL] == step + 1:
                memory.head[_SEAL] = 0
        self._arriving.head[_RECOVERY] = recovery
        self._arriving.head[_SEAL] = step + 1

    def _of(self, step: int) -> "_Memory":
        return next(each for each in self._memories if each.head[_SEAL] == step + 1)

    def release(self) -> None:
        """Forget what was copied, and free the memory."""
        for memory in self._memories:
            memory.release()

    def drop_after(self, step: int) -> None:
        """Forget copies of later steps, which are trained again."""
        self.keep({each: recovery for each, recovery in self.made.items() if each <= step})

    def keep(self, made: Mapping[int, int]) -> None:
        """Keep these copies alone: their steps, and the number of the last recovery before each was made."""
        for memory in self._memories:
            if made.get(memory.head[_SEAL] - 1) != memory.head[_RECOVERY]:
                memory.head[_SEAL] = 0

    def renumber(self, step: int) -> None:
        """The copy made after `step`, from which the run goes on, counts as made after the last recovery."""
        self._of(step).head[_RECOVERY] = self.recovery


class _Memory:
    """The memory of one copy: a head, a text, tensors.

    Attributes:
        head: its int64 numbers.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size < _HEAD_BYTES:
            os.ftruncate(descriptor, _HEAD_BYTES)
        self._head = mmap.mmap(descriptor, _HEAD_BYTES)
        self.head = memoryview(self._head).cast("q")
        self._all = torch.empty(0, dtype=torch.uint8)

    def open(self, text_bytes: int, tensor_bytes: int) -> Tensor:
        """Make room; returns the part for the tensors, uint8."""
        start = _HEAD_BYTES + -(-text_bytes // _HEAD_BYTES) * _HEAD_BYTES
        size = start + tensor_bytes
        try:
            if os.fstat(self._descriptor).st_size < size:
                os.posix_fallocate(self._descriptor, 0, size)  # an error here, and no signal at the first write
        except OSError as error:
            raise RunError(
                f"copies of the state for --recover: {size:,} bytes of memory cannot be had ({error.strerror}). Use "
                "--copy_steps 0, which recovers from checkpoints alone."
            ) from error
        self._map()
        self.head[_LENGTH] = text_bytes
        return self._all[start:size]

    def write_text(self, text: bytes) -> None:
        """Write the text, behind the head."""
        self._all[_HEAD_BYTES : _HEAD_BYTES + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))

    def read(self) -> tuple[str, Tensor]:
        """The text, and the part of the tensors."""
        self._map()
        length = self.head[_LENGTH]
        text = self._all[_HEAD_BYTES : _HEAD_BYTES + length].numpy().tobytes().decode()
        return text, self._all[_HEAD_BYTES + -(-length // _HEAD_BYTES) * _HEAD_BYTES :]

    def packed(self) -> Tensor:
        """All behind the head."""
        self._map()
        return self._all[_HEAD_BYTES:]

    def release(self) -> None:
        """Forget the copy, and free all but the head."""
        self.head[_SEAL] = 0
        self._all = torch.empty(0, dtype=torch.uint8)
        os.ftruncate(self._descriptor, _HEAD_BYTES)

    def _map(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if len(self._all) != size:
            self._all = torch.frombuffer(mmap.mmap(self._descriptor, size), dtype=torch.uint8)


def _tensors(contents: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    for name, tensor in contents["model"].items():
        yield ("model", name), tensor
    for name, found in contents["optimizer"].tensors.items():
        for key, tensor in found.items():
            yield ("optimizer", name, key), tensor
    for name, tensor in contents["random"].tensors.items():
        yield ("random", name), tensor
