"""The weight files of a Hugging Face directory: which they are, and their tensors. Nothing is ever unpickled."""

import errno
import math
import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from pipeloom.common.json_reader import parse_json
from pipeloom.common.recorded_file import is_file_name
from pipeloom.common.tensor_file import StoredTensor, TensorSource, stored_tensors
from pipeloom.errors import CheckpointError, InputError, folded

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# torch dtype -> its name in safetensors.
SAFETENSORS_TYPES: dict[torch.dtype, str] = {
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
TORCH_TYPES = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}


def is_huggingface_directory(directory: Path) -> bool:
    """Whether a directory has a configuration and weights of transformers."""
    has = [(directory / name).is_file() for name in (CONFIG_NAME, SINGLE_NAME, INDEX_NAME)]
    return has[0] and (has[1] or has[2])


def find_tensors(directory: Path, named: str | None = None) -> dict[str, StoredTensor]:
    """The tensors of all weight files of a directory by the names that they have there; reads headers alone.

    Args:
        directory: with model.safetensors, or with several files and an index.
        named: a file or index of another name.

    Raises:
        InputError: the directory has no such files.
        CheckpointError: a file is missing or damaged, or an index is wrong.
    """
    names = [SINGLE_NAME, INDEX_NAME] if named is None else [named]
    name = next((name for name in names if (directory / name).is_file()), None)
    if name is None:
        raise InputError(_without_files(directory, names[0]))
    try:
        if not name.endswith(".json"):
            return stored_tensors(directory / name)
        return _indexed(directory, name)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} cannot be read ({error.strerror}). Copy the directory again."
        ) from None


def _indexed(directory: Path, name: str) -> dict[str, StoredTensor]:
    try:
        weight_map = parse_json((directory / name).read_bytes())["weight_map"]
        files = {file: directory / file for file in weight_map.values() if is_file_name(file)}
        wrong = [file for file in weight_map.values() if file not in files]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{directory / name} is no index of safetensors files. Copy it again.") from None
    if wrong:
        raise CheckpointError(
            f"{directory / name} names {folded(wrong[0])}, which is not in the directory. Copy it again."
        )
    stored = {file: stored_tensors(path) for file, path in files.items()}
    for key, file in weight_map.items():
        if key not in stored[file]:
            raise CheckpointError(
                f"{directory / file} has no tensor {folded(key)}, which {name} names. Copy the files again."
            )
    return {key: stored[file][key] for key, file in weight_map.items()}


def _without_files(directory: Path, wanted: str) -> str:
    pickled = sorted(path.name for kind in ("*.bin", "*.pt", "*.pth") for path in directory.glob(kind))
    if pickled:
        return (
            f"{directory} has its weights in {pickled[0]}, which only unpickling reads. Convert them once with "
            "transformers: Class.from_pretrained(DIR, use_safetensors=False).save_pretrained(NEW)."
        )
    if any(directory.glob("*.safetensors")):
        return f"{directory} has safetensors files and no {INDEX_NAME}. Copy the index too."
    return f"{directory} has no {wanted}. Pass a directory with {CONFIG_NAME} and safetensors files."


def mapped(stored: StoredTensor) -> Tensor:
    """A tensor whose memory is the file: what is read of it takes memory, as long as the tensor lives.

    Raises:
        MemoryError: the process has no memory for it.
        CheckpointError: the file cannot be read.
    """
    dtype, number = TORCH_TYPES[stored.dtype], math.prod(stored.shape)
    if number == 0:
        return torch.empty(stored.shape, dtype=dtype)
    base = stored.start - stored.start % mmap.ALLOCATIONGRANULARITY
    try:
        with open(stored.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), stored.stop - base, access=mmap.ACCESS_COPY, offset=base)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ENOMEM:
            raise MemoryError(f"mapping {stored.path}: {os.strerror(errno.ENOMEM)}") from error
        raise CheckpointError(f"{stored.path} cannot be read ({error}). Copy it again.") from error
    return torch.frombuffer(memory, dtype=dtype, count=number, offset=stored.start - base).view(stored.shape)


def tensor_source(name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> TensorSource:
    """A tensor to write, in another `shape` if given. Raises CheckpointError for unsupported tensors."""
    dtype = SAFETENSORS_TYPES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, {tensor.layout}, which safetensors does not support. Convert it."
        )

    def read() -> memoryview:
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        return memoryview(flat.view(torch.uint8).numpy().data)

    return TensorSource(dtype, tuple(tensor.shape) if shape is None else shape, read)
