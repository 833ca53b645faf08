"""Reads the tensors of a safetensors file with a record; bytes are compared with its hashes before they are used."""

import math
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.common.recorded_file import FileRecord, RecordedFile
from pipeloom.common.tensor_file import StoredTensor, stored_tensors
from pipeloom.errors import CheckpointError
from pipeloom.pretrained.files import TORCH_TYPES


class CheckedTensors:
    """The tensors of a file, with the interface of `safetensors.safe_open`, whose memory is the file's own.

    Methods raise OSError, and CheckpointError for a file that differs from its record.
    """

    def __init__(self, path: Path, record: FileRecord) -> None:
        self._path, self._tensors = path, stored_tensors(path, RecordedFile(path, record))

    def keys(self) -> Iterable[str]:
        """The names of the tensors."""
        return self._tensors

    def get_slice(self, name: str) -> "TensorSlices":
        """A tensor of which parts are read."""
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name}: the file does not fit the manifest.")
        return TensorSlices(self._tensors[name])

    def get_tensor(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.get_slice(name)[()]


class TensorSlices:
    """A tensor of a file; indexing it with slices reads the rows around them."""

    def __init__(self, stored: StoredTensor) -> None:
        self._stored = stored

    def get_shape(self) -> list[int]:
        """The shape of the tensor."""
        return list(self._stored.shape)

    def get_dtype(self) -> str:
        """The dtype of the tensor, as safetensors names it."""
        return self._stored.dtype

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        stored = self._stored
        bounds = [each.indices(size)[:2] for each, size in zip(index, stored.shape, strict=False)]
        # Leading dimensions of one index, and the first of several, are together one range of the file.
        first, row, read, shape = 0, math.prod(stored.shape), 0, list(stored.shape)
        for (start, stop), size in zip(bounds, stored.shape, strict=False):
            row //= max(1, size)
            first += start * row
            shape[read], read = max(0, stop - start), read + 1
            if stop - start != 1:
                break
        dtype, number = TORCH_TYPES[stored.dtype], math.prod(shape)
        if number == 0:
            found = torch.empty(shape, dtype=dtype)
        else:
            begin = stored.start + first * dtype.itemsize
            data = bytearray(stored.file.read(begin, begin + number * dtype.itemsize))
            found = torch.frombuffer(data, dtype=dtype).view(shape)
        return found[tuple(slice(None) if n < read else slice(*bound) for n, bound in enumerate(bounds))]
