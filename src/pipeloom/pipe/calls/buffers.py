"""Buffers that a forward changes, where the backward runs it again."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from pipeloom.errors import RunError

Norm = nn.modules.batchnorm._NormBase  # its buffers are statistics, which do not change results in training


@contextmanager
def kept_statistics(module: nn.Module) -> Iterator[None]:
    """Around a recomputation: running statistics stay as the forward left them.

    The recomputation updates copies. Its graph keeps them: to overwrite them would look like an error to autograd.
    """
    held = [(part, dict(part._buffers)) for part in module.modules() if isinstance(part, Norm)]
    for part, buffers in held:
        part._buffers.update({name: buffer if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for part, buffers in held:
            part._buffers.update(buffers)


class BufferCheck:
    """Notes the buffers of a module that a recomputation could not restore, before a forward."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (part, f"{prefix}.{name}", name, buffer, buffer._version)
            for prefix, part in module.named_modules()
            if not isinstance(part, Norm)
            for name, buffer in part.named_buffers(recurse=False)
        ]

    def check(self, place: str) -> None:
        """After the forward.

        Raises:
            RunError: it changed such a buffer, in place or by setting another one.
        """
        for part, path, name, buffer, version in self._before:
            if part._buffers.get(name) is not buffer or buffer._version != version:
                raise RunError(
                    f"{place} changes its buffer {path!r} in a forward: a recomputation would start from the changed "
                    "values. Use checkpoint='never'."
                )
