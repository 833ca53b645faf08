"""CUDA graphs: kernels that are recorded once and started again with one call."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


class Graphs(ABC):
    """Records what a device does, to do it again. All recordings share their memory.

    They are replayed in the order in which they were recorded, each once: a recording may then use memory that an
    earlier one has freed. Memory of tensors that still exist is not used again.
    """

    @abstractmethod
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` starts on the device, without doing it; returns the function that does it.

        Raises:
            RuntimeError: `run` needs a result on the host, or does something else that a graph cannot hold.
        """

    @abstractmethod
    def alias(self, tensor: Tensor) -> Tensor:
        """The memory of a tensor of a recording, without keeping it: it is used again once the tensor is gone."""


class _Memory:
    """Bytes of a device, as torch.as_tensor takes them."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class CudaGraphs(Graphs):
    """CUDA graphs with a memory pool of their own, recorded from and replayed in the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as those of data loaders, may go on calling CUDA.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the capture is invalid already
                graph.capture_end()
            raise
        graph.capture_end()
        replay: Callable[[], None] = graph.replay
        return replay

    def alias(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor.detach().clone()
        memory = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=self._device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
