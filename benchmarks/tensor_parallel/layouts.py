"""pipeloom's GPT in every layout of tensor parallelism: 1d, 2d, 2.5d and 3d."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn
from pipeloom.parallel.placed import placed_block


@dataclass(frozen=True, kw_only=True)
class GridSizes:
    """pipeloom's GPT and one micro-batch."""

    width: int
    heads: int = 8
    layers: int = 4
    micro_batch: int = 8
    sequence_length: int = 128
    vocabulary: int = 512
    num_microbatches: int = 1

    def model(self) -> GPT:
        sizes = (self.vocabulary, self.layers, self.width, self.heads, self.sequence_length)
        names = ("vocabulary_size", "layers", "width", "heads", "sequence_length")
        model = GPT(GPTConfig(**dict(zip(names, sizes, strict=True))))
        init_parameters(model, seed=0)
        return model

    def batch(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(11)
        shape = (self.micro_batch, self.sequence_length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_fn(output, target)

    def without_waits(self) -> GridSizes:
        return self


class GridTensor:
    """`pipeloom.parallelize` with a layout."""

    def __init__(self, sizes: GridSizes, *, layout: str, depth: int | None = None, sequence: bool = False) -> None:
        self.mesh = pl.Mesh(tp=dist.get_world_size())
        model = pl.parallelize(sizes.model(), self.mesh, layout=layout, depth=depth, sequence=sequence)
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=sizes.num_microbatches)
        self._pipe = pl.Pipeline(model, schedule, loss_fn=loss_fn, mesh=self.mesh)
        self._batch = sizes.batch()
        self.parameters = dict(self._pipe.named_parameters())

    def step(self) -> Tensor | None:
        return self._pipe.step(*self._batch)

    def gradients(self) -> Iterable[tuple[str, Tensor | None, Any]]:
        for name, parameter in self.parameters.items():
            block = placed_block(parameter)
            yield name, parameter.grad, (lambda full: full) if block is None else block.cut

    def waited(self) -> float:
        return sum(traffic.seconds for traffic in self.mesh.meter.traffic.values())

    def close(self) -> None:
        self._pipe.close()
        self.mesh.close()
