"""`DataSharing`: how data-parallel replicas share parameters and gradients, and in which number formats."""

from typing import Any

import torch
from torch import Tensor, nn

from pipeloom.engine.rank_state import LossFn
from pipeloom.engine.stores.blocks import Blocks
from pipeloom.engine.stores.parameter_store import ParameterStore
from pipeloom.engine.stores.sharing import RankModules, Sharing
from pipeloom.errors import InputError
from pipeloom.ir import DataAxis
from pipeloom.parallel.data.replica_groups import ReplicaGroups
from pipeloom.parallel.data.unit_store import UnitStore
from pipeloom.parallel.mesh import Mesh
from pipeloom.parallel.mesh_blocks import MeshBlocks
from pipeloom.parallel.mixed_precision import DTYPES
from pipeloom.parallel.options import DataParallel, OffloadTarget, Precision, axis_of
from pipeloom.transport.values import MicroBatches, Value, flatten, unflatten, with_form


def share(mesh: Mesh | None, data: Any, precision: Any, timeout_seconds: float) -> Sharing:
    """How the replicas of a pipeline share parameters and gradients.

    Args:
        mesh: axes dp and cp hold the replicas, of which ep may divide the experts, axis tp the processes of a stage;
            None: one of each.
        data: `DataParallel`, the name of a strategy, or None for ddp.
        precision: `Precision`, the name of a format, or None for the model's own.
        timeout_seconds: how long replicas wait for each other.

    Raises:
        InputError: an unknown name, or parameters that cannot be offloaded.
    """
    options, formats = DataParallel.of(data), Precision.of(precision)
    replicas = ReplicaGroups(mesh, timeout_seconds)
    axis = axis_of(options, formats, replicas.every.degree)
    sharded = axis is not None and axis.strategy.shards_optimizer
    is_cut = mesh is not None and (mesh.degree("tp") > 1 or mesh.degree("ep") > 1)
    blocks = MeshBlocks(mesh, sharded=sharded) if mesh is not None and is_cut else Blocks()
    return Sharing(blocks) if axis is None else DataSharing(axis, options, formats, replicas, blocks)


class DataSharing(Sharing):
    """How replicas share work and memory where there are several, or shards or master parameters."""

    def __init__(
        self, axis: DataAxis, data: DataParallel, precision: Precision, replicas: ReplicaGroups, blocks: Blocks
    ) -> None:
        super().__init__(blocks)
        self._data, self._precision, self._replicas = data, precision, replicas
        self.axis = axis
        self.replica, self.replica_ranks = replicas.every.index, replicas.every.members
        self.sharded = axis.strategy.shards_optimizer
        target = "memory" if data.offload is None else OffloadTarget.parse(data.offload).kind
        self.terms = [data.layout, str(data.bucket_bytes), precision.dtype, precision.gradients, target]

    def counts(self, parameter: nn.Parameter) -> bool:
        return self.sharded or self._replicas.of(parameter).index == 0

    def check_device(self, device: torch.device) -> None:
        where = self._data.offload
        if where is not None and device.type == "cuda":
            raise InputError(
                f"offload={where!r}: the main parameters of a model on {device} cannot be offloaded: what came back "
                "from pinned memory was not what had left. Offload optimizer states with pipeloom.OffloadedOptimizer, "
                "or activations."
            )
        if where is not None:
            OffloadTarget.parse(where).check_device(device.type, f"offload={where!r}", "parameters")

    def store(self, rank: RankModules) -> ParameterStore:
        assert self.axis is not None
        return UnitStore(rank, self.axis, self._data, self._precision, self._replicas)

    def sum_losses(self, loss: Tensor) -> Tensor:
        return self._replicas.every.sum_in_order(loss)

    def leave(self) -> None:
        super().leave()
        self._replicas.leave()

    def inputs(self, value: Value) -> Value:
        cast = self._precision.has_masters and value is not None
        return _cast(value, DTYPES[self._precision.dtype]) if cast else value

    def loss_fn(self, loss_fn: LossFn | None) -> LossFn | None:
        if loss_fn is None or not self._precision.has_masters or getattr(loss_fn, "joins_targets", False):
            return loss_fn
        return lambda output, targets: loss_fn(_cast(output, torch.float32), targets)


def _cast(value: Value, dtype: torch.dtype) -> Value:
    """The value with its floating-point tensors cast to `dtype`."""
    if isinstance(value, MicroBatches):
        return MicroBatches(_cast(each, dtype) for each in value)
    layout, tensors = flatten(value)
    cast = [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]
    return with_form(unflatten(layout, cast), value)
