"""`Copies`: the processes that hold the same stages in all copies of a pipeline, and their collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeloom.errors import PeerLost
from pipeloom.ir import Action, Op
from pipeloom.runtime.beside import BesideTimes
from pipeloom.runtime.process_mesh import ProcessMesh

Wait = Callable[[], Any]

# Their names before torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Copies:
    """Those along the axis dp of a mesh. Of one copy, what is collective costs nothing.

    Args:
        mesh: None: there is one copy.
        timeout_seconds: how long to wait for the others; a collective raises PeerLost afterwards.

    Attributes:
        degree: how many.
        index: which one this process belongs to.
        times: where gathers and reductions that an action starts are noted; those of one store.
    """

    def __init__(self, mesh: ProcessMesh | None, timeout_seconds: float = 1800.0) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        self.degree = 1 if mesh is None else mesh.degree("dp")
        self.index = 0 if mesh is None else mesh.coordinate("dp")
        self.times = BesideTimes()
        self._group = None if mesh is None or self.degree == 1 else mesh.group("dp")
        backend = "gloo" if self._group is None else dist.get_backend(self._group)
        self._small = torch.device("cuda") if "nccl" in backend else torch.device("cpu")

    def broadcast(self, values: Tensor) -> Wait:
        """The values of copy 0, in place."""
        return self._start(dist.broadcast, values, op=Op.UNSHARD, group_src=0)

    def reduce(self, values: Tensor) -> Wait:
        """The sum over copies, in place, on copy 0; the others' values are lost."""
        return self._start(dist.reduce, values, op=Op.REDUCE_GRAD, group_dst=0)

    def all_reduce(self, values: Tensor) -> Wait:
        """The sum over copies, in place: the same bits on every copy."""
        return self._start(dist.all_reduce, values, op=Op.REDUCE_GRAD)

    def all_gather(self, values: Tensor, own: Tensor) -> Wait:
        """Every copy's `own`, one behind the other in `values`; `own` may be its place there."""
        return self._start(_ALL_GATHER, values, own, op=Op.UNSHARD)

    def reduce_scatter(self, values: Tensor, own: Tensor) -> Wait:
        """In `own`, this copy's of equal pieces of the sum over copies of `values`, which are lost."""
        if values.device.type != "cpu":
            return self._start(_REDUCE_SCATTER, own, values, op=Op.REDUCE_GRAD)
        # Over gloo a reduce-scatter takes several times as long as an all-reduce of the same values.
        wait = self.all_reduce(values)

        def finish() -> None:
            wait()
            own.copy_(values[self.index * own.numel() : (self.index + 1) * own.numel()])

        return finish

    def sum_in_order(self, values: Tensor) -> Tensor:
        """The sum of a few numbers, copy after copy: the same bits on every copy."""
        if self._group is None:
            return values
        gathered = [torch.empty_like(values, device=self._small) for _ in range(self.degree)]
        self._start(dist.all_gather, gathered, values.to(self._small))()
        total = gathered[0]
        for part in gathered[1:]:
            total += part
        return total.to(values.device)

    def any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on some copy."""
        if self._group is None or not flags:
            return flags
        values = torch.tensor(flags, dtype=torch.uint8, device=self._small)
        self._start(dist.all_reduce, values, dist.ReduceOp.MAX)()
        return [bool(value) for value in values.tolist()]

    def _start(self, collective: Callable[..., Any], *arguments: Any, op: Op | None = None, **options: Any) -> Wait:
        """Start it; what is returned waits for its end. It is noted as an `op` of the stage that runs."""
        if self._group is None:
            return _nothing
        action, ended = self.times.action, _nothing
        if action is not None and op is not None:
            ended = self.times.started(Action(action.stage, op) if op is Op.UNSHARD else action.with_op(op))
        with _noticing_lost_peers():
            work = collective(*arguments, group=self._group, async_op=True, **options)
        if ended is not _nothing and self._small.type == "cpu":  # on a GPU it would be called at once
            work.get_future().add_done_callback(lambda _: ended())

        def wait() -> None:
            with _noticing_lost_peers(), self.times.waiting():
                work.wait(self._timeout)
            ended()

        return wait


def _nothing() -> None:
    pass


@contextmanager
def _noticing_lost_peers() -> Iterator[None]:
    """Backends raise a plain RuntimeError when a peer is gone."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(
            f"another copy of this pipeline went away during a collective ({str(error).splitlines()[0]})"
        ) from error
