"""Graphs on the CPU: operations are noted while they run, undone, and run again into the same memory."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeloom.devices.graphs import Graphs


class _Recorder(TorchDispatchMode):
    """Notes every operation, and what its results and the tensors that it changed held before."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self.before += [(tensor, tensor.detach().clone()) for tensor in given]
        result = func(*args, **kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in given}
        results = tree_leaves(result)
        for made in results:
            if isinstance(made, Tensor) and made.is_floating_point() and made.untyped_storage()._cdata not in known:
                self.before.append((made, torch.full_like(made, float("nan"))))
        self.operations.append((func, args, kwargs, results))
        return result


class FakeGraphs(Graphs):
    """As with CUDA, nothing has been done before the first replay: results are not numbers, changes are undone."""

    def __init__(self) -> None:
        self.num_recordings = 0
        self.num_replays = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        recorder = _Recorder()
        with recorder:
            run()
        self.num_recordings += 1
        for tensor, before in reversed(recorder.before):
            tensor.data.copy_(before)  # .data: autograd sees no change
        recorder.before.clear()

        def replay() -> None:
            self.num_replays += 1
            with torch.no_grad():
                for func, args, kwargs, results in recorder.operations:
                    for old, new in zip(results, tree_leaves(func(*args, **kwargs)), strict=True):
                        if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                            old.data.copy_(new)

        return replay

    def alias(self, tensor: Tensor) -> Tensor:
        return tensor.detach()
