"""`ReplicaGroup`: the processes that hold the same stages in all replicas, with the collectives of each strategy."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from statistics import fmean, median
from typing import Any, assert_never

import torch
from torch import Tensor

from pipeloom.engine.overlap_times import OverlapTimes, Wait, no_wait
from pipeloom.errors import PeerLost
from pipeloom.ir import Action, DataStrategy, Op
from pipeloom.parallel.data.links import LOST, Links, Parts, ProcessLinks, SharedLinks
from pipeloom.parallel.mesh import Mesh
from pipeloom.processes.collectives import noticing_lost_peers
from pipeloom.processes.waits import waits_for
from pipeloom.transport.shared_flat import SharedFlat

# The axes along which processes hold the same parameters and see other data. Experts are the
# same along edp alone.
REPLICA_AXES = ("dp", "cp")
EXPERT_REPLICA_AXES = ("edp",)


class ReplicaGroup:
    """The processes along some axes of a mesh that hold the same parameters. With one, collectives do nothing.

    Along cp, each process has a part of every sequence: to parameters, gradients and losses it is one more replica,
    whose batch is a part of the tokens.

    Args:
        mesh: with the replicas; None: one replica.
        timeout_seconds: how long a collective waits for the other replicas before it raises PeerLost.
        axes: of the replicas.

    Attributes:
        degree: number of replicas.
        index: number of this process's replica.
        members: the processes of all replicas, by their rank in the default group; empty where there is one replica.
        shares_memory: whether all replicas can read memory of this process's host in place.
        times: record gathers and reductions that actions start.
    """

    def __init__(self, mesh: Mesh | None, timeout_seconds: float = 1800.0, axes: Sequence[str] = REPLICA_AXES) -> None:
        self._timeout, self._axes = timedelta(seconds=timeout_seconds), axes
        self.degree = 1 if mesh is None else math.prod(map(mesh.degree, axes))
        self._mesh = None if self.degree == 1 else mesh
        self.members = () if self._mesh is None else self._mesh.line(*axes)
        self._links = None if self._mesh is None else self._mesh.links(*axes)
        self.index = 0 if self._links is None else self._links.index
        self._others = [peer for peer in range(self.degree) if peer != self.index]
        self.times = OverlapTimes()
        self._begun: dict[int, deque[Any]] = {}  # works of the collectives that have started
        self._has_left = False
        links = self._links
        self._nccl = links if isinstance(links, ProcessLinks) and "nccl" in links.backend else None
        self.shares_memory = isinstance(links, SharedLinks)
        self._has_gloo = links is not None and self._nccl is None and links.backend != "threads"
        self._small = torch.device("cuda") if self._nccl is not None else torch.device("cpu")

    def gather_full(self, strategy: DataStrategy, full: Tensor, own: Tensor) -> Wait:
        """Fill `full` parameters with the segments of the replicas that update them; `own` is this replica's."""
        match strategy:
            case DataStrategy.DDP:
                return no_wait
            case DataStrategy.PARAMETER_SERVER:
                return self.broadcast(full)
            case DataStrategy.ZERO1 | DataStrategy.ZERO2 | DataStrategy.ZERO3:
                return self.all_gather(full, own)
            case _:
                assert_never(strategy)

    def reduce_full(self, strategy: DataStrategy, full: Tensor) -> tuple[Wait, Tensor]:
        """Sum `full` gradients over replicas; returns the `Wait`, and the memory of this replica's segment."""
        match strategy:
            case DataStrategy.DDP:
                return self.all_reduce(full), full
            case DataStrategy.PARAMETER_SERVER:
                return self._reduce(full), full if self.index == 0 else full[:0].clone()
            case DataStrategy.ZERO1 | DataStrategy.ZERO2 | DataStrategy.ZERO3:
                own = full.new_empty(full.numel() // self.degree)
                return self.reduce_scatter(full, own), own
            case _:
                assert_never(strategy)

    def broadcast(self, values: Tensor) -> Wait:
        """Broadcast the values of replica 0, in place."""
        if self._goes_through_cpu(values):
            return self._through_cpu(values, self.broadcast)
        return self._start(lambda links: links.broadcast(values), Op.UNSHARD)

    def all_reduce(self, values: Tensor) -> Wait:
        """The sum over replicas, in place: the same bits on every replica."""
        if self._goes_through_cpu(values):
            return self._through_cpu(values, self.all_reduce)
        return self._start(lambda links: links.all_reduce(values), Op.REDUCE_GRAD)

    def _reduce(self, values: Tensor) -> Wait:
        """The sum over replicas, in place on replica 0."""
        if self._goes_through_cpu(values):
            return self._through_cpu(values, self._reduce)
        return self._start(lambda links: links.reduce(values), Op.REDUCE_GRAD)

    def _goes_through_cpu(self, values: Tensor) -> bool:
        """Whether values are on a device that replicas share: NCCL needs one per process, and gloo CPU tensors."""
        return self._has_gloo and values.device.type != "cpu"

    def _through_cpu(self, values: Tensor, collective: Callable[[Tensor], Wait]) -> Wait:
        """A collective in place, on a copy of the values on the CPU; its wait copies the result back."""
        host = values.cpu()
        wait, copies = collective(host), deque([host])

        def finish() -> None:
            wait()
            while copies:  # a wait may be called again
                values.copy_(copies.popleft())

        return finish

    def all_gather(self, values: Tensor, own: Tensor) -> Wait:
        """Every replica's `own`, in order, into `values`; `own` may be a view of its place there."""
        return self._all_gather(values, own, Op.UNSHARD)

    def _all_gather(self, values: Tensor, own: Tensor, op: Op | None) -> Wait:
        if self._goes_through_cpu(values):
            host = own.cpu()
            return self._through_cpu(values, lambda full: self._all_gather(full, host, op))
        if values.device.type != "cpu" and (nccl := self._nccl) is not None:
            return self._start(lambda _: nccl.all_gather(values, own), op)
        pieces = values.view(self.degree, own.numel())
        if pieces[self.index].data_ptr() != own.data_ptr():
            pieces[self.index].copy_(own)
        return self._exchange(dict.fromkeys(self._others, own), {peer: pieces[peer] for peer in self._others}, op)

    def reduce_scatter(self, values: Tensor, own: Tensor) -> Wait:
        """Into `own`, this replica's segment of the sum over replicas of `values`, which are lost."""
        if self._goes_through_cpu(values):
            full = values.cpu()
            return self._through_cpu(own, lambda part: self.reduce_scatter(full, part))
        if values.device.type != "cpu" and (nccl := self._nccl) is not None:
            return self._start(lambda _: nccl.reduce_scatter(values, own), Op.REDUCE_GRAD)
        pieces = values.view(self.degree, own.numel())
        return self._start(lambda links: links.sum_pieces(list(pieces), own), Op.REDUCE_GRAD)

    def sum_parts(
        self, leaving: Mapping[int, Parts], own: list[Tensor], take_sums: Callable[[list[Tensor]], object]
    ) -> Wait:
        """`SharedLinks.sum_parts`, between replicas that share memory."""
        links = self._links
        assert isinstance(links, SharedLinks)
        return self._start(lambda _: links.sum_parts(leaving, own, take_sums), Op.REDUCE_GRAD)

    def sum_in_order(self, values: Tensor) -> Tensor:
        """The sum of a small tensor, in the order of replicas: the same bits on every replica."""
        total, *others = self.gather(values)
        for part in others:
            total = total + part
        return total.to(values.device)

    def gather(self, values: Tensor) -> list[Tensor]:
        """A small tensor of every replica."""
        if self._mesh is None:
            return [values]
        rows = torch.empty((self.degree, *values.shape), dtype=values.dtype, device=self._small)
        rows[self.index] = values
        self._all_gather(rows.view(-1), rows[self.index].reshape(-1), None)()
        return list(rows)

    def any(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any replica."""
        if self._mesh is None or not flags:
            return flags
        found: list[bool] = torch.stack(self.gather(torch.tensor(flags, dtype=torch.uint8))).any(dim=0).tolist()
        return found

    def meet(self) -> Wait:
        """Start to wait until all replicas have called this."""
        if self._mesh is None:
            return no_wait
        token = torch.zeros(1, dtype=torch.uint8, device=self._small)
        if self._nccl is not None:
            return self._all_gather(token.new_empty(self.degree), token, None)
        return self._exchange(dict.fromkeys(self._others, token), {p: token.clone() for p in self._others}, None)

    def flat(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> SharedFlat | None:
        """Memory that all replicas read in place; None: they have none in common. Every replica calls it."""
        if self._links is None or device.type != "cpu" or not num_elements:
            return None
        return self._links.flat(num_elements, dtype)

    def read_in_place(self, updated: Wait) -> Wait:
        """A gather of parameters in memory from `flat`, where `updated` waits until all replicas have their values."""
        ended = self._recorded(Op.UNSHARD)

        def wait() -> None:
            updated()
            ended()

        return wait

    def end_run(self) -> None:
        """Called when a run is over on this replica."""
        if self._links is not None:
            with noticing_lost_peers(LOST):
                self._links.end_run()

    def leave(self) -> None:
        """Called after an error: closes the connections, so that the other replicas stop waiting at once."""
        self._has_left = True
        for works in self._begun.values():  # works keep connections open, and a traceback keeps works alive
            works.clear()
        self._begun.clear()
        if self._mesh is not None:
            self._mesh.leave(*self._axes)

    def _exchange(self, leaving: Mapping[int, Tensor], arriving: Mapping[int, Tensor], op: Op | None) -> Wait:
        """Send to and receive from each other replica directly. Its record ends with its wait."""
        return self._start(lambda links: links.exchange(leaving, arriving), op)

    def _recorded(self, op: Op | None) -> Wait:
        """Record the start of an `op` of the running action's stage; returns what records its end."""
        action = self.times.action
        if action is None or op is None:
            return no_wait
        return self.times.started(Action(action.stage, op) if op is Op.UNSHARD else action.with_op(op))

    def _start(self, begin: Callable[[Links], list[Any]], op: Op | None) -> Wait:
        """Start a collective, recorded as an `op` of the running action's stage; returns what waits for its end."""
        if self._links is None:
            return no_wait
        ended = self._recorded(op)
        works: deque[Any] = deque()
        self._begun[id(works)] = works  # `leave` clears them
        with noticing_lost_peers(LOST):
            works.extend(begin(self._links))
        if ended is not no_wait:
            self._links.on_end(works, ended)

        is_over = False

        @waits_for(lambda at: at["self"].members)
        def wait() -> None:
            nonlocal is_over
            if self._has_left:
                raise PeerLost(LOST)
            if is_over:
                return
            with noticing_lost_peers(LOST), self.times.waiting():
                while works:
                    works[0].wait(self._timeout)
                    works.popleft()
            self._begun.pop(id(works), None)
            is_over = True
            ended()

        return wait


def time_collectives(
    replicas: ReplicaGroup,
    strategy: DataStrategy,
    op: Op,
    sizes: Iterable[int],
    *,
    device: torch.device | None = None,
    meet: Callable[[], object] = lambda: None,
    repeats: int = 5,
) -> list[tuple[int, float, float]]:
    """Time the gather (UNSHARD) or reduction (REDUCE_GRAD) of a strategy; every replica passes the same arguments.

    The times include the allocations and copies that a unit makes for a collective.

    Args:
        replicas: the processes of the collective.
        strategy: determines the collective.
        op: UNSHARD or REDUCE_GRAD.
        sizes: bytes of full parameters or gradients, float32.
        device: of the tensors; the CPU by default.
        meet: called before each size, such as a barrier, so that all ranks of a pipeline start together.
        repeats: timed collectives per size, after one for warm-up.

    Returns:
        For each size: bytes, median seconds, and mean CPU seconds of this process. Empty where the strategy has no such
        collective, or there is one replica.
    """
    if replicas.degree == 1 or (op is Op.UNSHARD and not strategy.shards_optimizer):
        return []
    found = []
    for size in sizes:
        elements = max(1, size // 4 // replicas.degree)
        full, own = torch.zeros(elements * replicas.degree, device=device), torch.zeros(elements, device=device)
        seconds, cpu = [], []
        meet()
        for _ in range(1 + repeats):
            before, begin = time.process_time(), time.perf_counter()
            if op is Op.UNSHARD:
                replicas.gather_full(strategy, torch.empty_like(full) if strategy.shards_parameters else full, own)()
            else:
                replicas.reduce_full(strategy, full.clone())[0]()
            if full.is_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - begin)
            cpu.append(time.process_time() - before)
        found.append((full.nbytes, median(seconds[1:]), fmean(cpu[1:])))
    return found
