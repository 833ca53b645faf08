"""`EqualModels`: whether ranks that share layers start from the same weights, before each keeps its blocks."""

import torch
from torch import Tensor, nn

from pipeloom.errors import InputError
from pipeloom.parallel.axis import Axis
from pipeloom.parallel.mesh import Mesh

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element
_PIECE = 1 << 22  # elements, so that temporary tensors stay small


class EqualModels:
    """Compares the weights of a model along axes tp and ep, by a checksum of their bits.

    Parameters on the meta device have no values yet and are left out.

    Args:
        model: before it is cut.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        named = [(name, p) for name, p in model.named_parameters() if not p.is_meta and p.numel()]
        self._names = [name for name, _ in named]
        self._sums = torch.tensor([_checksum(parameter) for _, parameter in named], dtype=torch.int64)

    def check(self, mesh: Mesh) -> None:
        """Compare; every process calls it. Its messages are not counted.

        Raises:
            InputError: on every process, the first parameter that differs.
        """
        names = [name for name in ("tp", "ep") if mesh.degree(name) > 1]
        if names:
            self._check(mesh, mesh.axis(*names), "tensor-parallel" if names == ["tp"] else "expert-parallel")

    def _check(self, mesh: Mesh, axis: Axis, kind: str) -> None:
        device = "cpu" if mesh.device_mesh is None else mesh.device_mesh.device_type
        with mesh.meter.paused():
            # Numbers of parameters first: tensors of different lengths cannot be gathered.
            counts = axis.all_gather(torch.tensor([len(self._names)], device=device)).tolist()
            if len(set(counts)) > 1:
                raise InputError(
                    f"the model has {counts[0]} parameters with values on {kind} rank 0, and others have "
                    f"{sorted(set(counts) - {counts[0]})}: all must start from the same model. Build the same one on "
                    "each."
                )
            if not self._names:
                return
            rows = axis.all_gather(self._sums.to(device)).view(axis.degree, -1).cpu()
        for member, found in enumerate(rows):
            differing = (found != self._sums).nonzero().view(-1).tolist()
            if differing:
                raise InputError(
                    f"parameter {self._names[differing[0]]!r} has other values on {kind} rank {member} than "
                    f"on rank {axis.index}: all must start from the same weights. Call torch.manual_seed with the same "
                    "seed on each before the model is built. Threads of run_threads share one random generator: build "
                    "the model before, and pass each a copy."
                )


def _checksum(values: Tensor) -> int:
    """The sum of the bits, taken as integers and weighted by their place modulo a prime; wraps around."""
    bits = values.detach().contiguous().view(-1).view(_WORDS[min(values.element_size(), 8)]).to(torch.int64)
    total = 0
    for start in range(0, bits.numel(), _PIECE):
        piece = bits[start : start + _PIECE]
        weights = torch.arange(1, piece.numel() + 1, device=piece.device) % 65_521 + 1
        total = (total * 31 + int((piece * weights).sum())) % 2**62
    return total
