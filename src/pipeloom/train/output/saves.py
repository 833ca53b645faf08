"""`Saves`: the checkpoints of a run, written between two steps, or in the background from a copy in memory.

    step 9 │ copy │ step 10 │ step 11 │ ...        the thread of the steps: waits for the save before, then copies
                  └─ write ─ hash ─ fsync ─ seal   a thread: `checkpoint.save`, over a process group of its own

Writing, hashing and synchronizing release the interpreter lock. The thread ends with its process, so that nothing stays
behind, and a save that a kill cuts short is cleaned up by the next one, as without this module.
"""

import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import CheckpointError
from pipeloom.processes.collectives import destroy_groups
from pipeloom.processes.exchange import DistributedExchange, Exchange
from pipeloom.processes.watchdog import BACKGROUND_THREAD
from pipeloom.train import checkpoint
from pipeloom.train.run_checkpoints import contents, save, saves_tensor
from pipeloom.train.run_parts import RunParts


class Saves:
    """The checkpoints of a run; every process makes one, and all call its methods after the same steps.

    Methods return lines to show. Iterators do their work while they are read: the line of a save that failed is shown
    before the next save, which may end the run.

    Args:
        run: this process's part.
    """

    def __init__(self, run: RunParts) -> None:
        self._run, self._config = run, run.config
        self._groups: list[dist.ProcessGroup] = []
        self._exchange = Exchange()
        if self._config.background_saves and run.group.size > 1:
            # Collectives of a thread must not mix with those of the steps.
            self._groups = [dist.new_group(backend="gloo")]
            self._exchange = DistributedExchange(self._groups[0])
        self._copies = HostCopies()
        self._pending: _Save | None = None
        self._failures = 0  # background saves in a row

    def save(self, step: int) -> Iterator[str]:
        """Save the state after `step`. In the background, this waits for the save before; after the last
        step, for this one too.

        Raises:
            CheckpointError: a rank failed. In the background, more than ``save_errors`` saves in a row have failed, and
                one between two steps has failed too.
        """
        if not self._config.background_saves:
            yield f"step {step}  saved {save(self._run, step)}"
            return
        yield from self._wait()
        if self._failures > self._config.save_errors:
            yield from self._save_now(step)
            return
        self._run.journal.enter(f"checkpoint after step {step}")
        given = self._copies.of_contents(contents(self._run))
        given |= {"exchange": self._exchange, "on_tensor": lambda: saves_tensor(self._run)}
        self._pending = _Save(self._run.output_dir, step, given)
        if step == self._config.steps:
            yield from self.finish(retry=step)

    def poll(self) -> list[str]:
        """The result of the background save, once."""
        if self._pending is None or self._pending.thread.is_alive():
            return []
        return self._take(self._pending)

    def finish(self, retry: int | None = None) -> Iterator[str]:
        """Wait for the background save. If it has failed, save once more, as that of step `retry`, unless it is None.

        Raises:
            CheckpointError: a rank failed in the second try.
        """
        yield from self._wait()
        if self._failures and retry is not None:
            yield from self._save_now(retry)

    def _save_now(self, step: int) -> list[str]:
        """Save between two steps, after saves in the background that failed."""
        lines = [f"step {step}  saved {save(self._run, step)}"]
        self._failures = 0
        return lines

    def close(self) -> None:
        """Destroy the process group. After an error, a save that waits for other processes ends with this one."""
        if self._pending is not None and not self._groups:
            self._pending.thread.join()
        elif self._pending is None:
            destroy_groups(self._groups)

    def _wait(self) -> list[str]:
        pending, lines = self._pending, list[str]()
        if pending is not None:
            self._run.journal.enter(f"checkpoint after step {pending.step}")
            pending.thread.join()
            lines = self._take(pending)
        return lines

    def _take(self, done: "_Save") -> list[str]:
        self._pending = None
        if done.error is None:
            self._failures = 0
            return [f"step {done.step}  saved {done.path}"]
        if not isinstance(done.error, CheckpointError):  # a rank was lost, or a defect
            raise done.error
        self._failures += 1
        last = self._failures > self._config.save_errors
        how = f"with save_errors={self._config.save_errors}, the run ends if the next save fails" if last else None
        return [f"step {done.step}  {done.error} Training goes on, and {how or 'the next save tries again'}."]


class _Save:
    """A save in a thread, which begins at once.

    Attributes:
        step: of the checkpoint.
        path: of the checkpoint, if it is complete.
        error: why it is not.
    """

    def __init__(self, output_dir: Path, step: int, given: Mapping[str, Any]) -> None:
        self._output_dir, self.step, self._given = output_dir, step, given
        self.path: Path | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, name=BACKGROUND_THREAD, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.path = checkpoint.save(self._output_dir, self.step, **self._given)
        except Exception as error:  # the thread of the steps raises it, or goes on
            self.error = error


class HostCopies:
    """Copies of tensors in host memory, which are written again at the next save."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, ...], Tensor] = {}

    def of_contents(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `checkpoint.save` with copies in place of the tensors of model and optimizer."""
        state: checkpoint.OptimizerState = given["optimizer"]
        copied = {
            name: {key: self._copy(("optimizer", name, key), tensor) for key, tensor in tensors.items()}
            for name, tensors in state.tensors.items()
        }
        return {**given, "model": self.of_model(given["model"]), "optimizer": replace(state, tensors=copied)}

    def of_model(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies by name; names of the same tensor have the same copy, since they are saved once."""
        copies: dict[tuple[Any, ...], Tensor] = {}
        found = {}
        for name, tensor in tensors.items():
            own = tensor.layout == torch.strided and tensor.numel() and tensor.data_ptr()
            place = (own, tensor.device, tensor.dtype, tensor.shape, tensor.stride()) if own else (name,)
            if place not in copies:
                copies[place] = self._copy(("model", name), tensor)
            found[name] = copies[place]
        return found

    def _copy(self, key: tuple[str, ...], tensor: Tensor) -> Tensor:
        held = self._held.get(key)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._held[key] = held
        return held.copy_(tensor.detach())
