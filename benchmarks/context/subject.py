"""What runs in each process: steps of one sequence, whole or divided between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn

WHOLE = "one process"


class System(NamedTuple):
    """A system under test."""

    ranks: int
    context: str | None


SYSTEMS = {
    WHOLE: System(1, None),
    "ring": System(2, "ring"),
    "ring, plain order": System(2, "ring-plain"),
    "ulysses": System(2, "ulysses"),
    "ring self-attention": System(2, "ring-self-attention"),
}


class Size(NamedTuple):
    """The model and its sequence."""

    sequence: int
    layers: int


def build(size: Size) -> GPT:
    model = GPT(GPTConfig(vocabulary_size=256, layers=size.layers, width=256, heads=4, sequence_length=size.sequence))
    init_parameters(model, seed=0)
    return model


def batch(sequence: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (1, sequence + 1), generator=torch.Generator().manual_seed(11))
    return tokens[:, :-1], tokens[:, 1:]


class Built(NamedTuple):
    """What a rank says of its first step.

    Attributes:
        error: largest difference from plain autograd, relative.
        kept_bytes: peak bytes that autograd kept, storages once, without parameters.
        sent_bytes: in collectives along cp.
    """

    error: float
    kept_bytes: int
    sent_bytes: int


class Step(NamedTuple):
    """One step of a rank.

    Attributes:
        start, end: by a clock that all ranks share.
        cpu: seconds of this process on a core.
        waited: seconds inside collectives.
    """

    start: float
    end: float
    cpu: float
    waited: float


class Subject:
    """One rank of a crew."""

    def __init__(self, rank: int, size: Size) -> None:
        self._size = size
        self._pipe: pl.Pipeline
        self._mesh: pl.Mesh

    def build(self, system: System, reference: str) -> Built:
        schedule = pl.schedules.one_f_one_b(num_ranks=1, num_microbatches=1)
        self._mesh = pl.Mesh(cp=system.ranks)
        self._pipe = pl.Pipeline(build(self._size), schedule, loss_fn=loss_fn, mesh=self._mesh, context=system.context)
        kept = SavedBytes(self._pipe.parameters())
        with kept.counting():
            loss = self._pipe.step(*batch(self._size.sequence))
        expected = load_file(reference)
        errors = [abs(float(loss - expected["loss"])) / float(expected["loss"])]
        for name, parameter in self._pipe.named_parameters():
            assert parameter.grad is not None, name
            errors.append(float((parameter.grad - expected[name]).abs().max() / expected[name].abs().max()))
        sent = sum(traffic.num_bytes for traffic in self._mesh.meter.traffic.values())
        return Built(max(errors), kept.peak, sent)

    def step(self) -> Step:
        for parameter in self._pipe.parameters():
            parameter.grad = None
        dist.barrier()
        waited, cpu, start = self._waited(), time.process_time(), time.monotonic()
        self._pipe.step(*batch(self._size.sequence))
        end = time.monotonic()
        return Step(start, end, time.process_time() - cpu, self._waited() - waited)

    def attend(self, system: System) -> tuple[float, float]:
        """Attention of one layer alone, forward and backward."""
        generator = torch.Generator().manual_seed(1)
        q, k, v = torch.randn(3, 1, 4, self._size.sequence // system.ranks, 64, generator=generator).unbind()
        q, k, v = (value.requires_grad_() for value in (q, k, v))
        dist.barrier()
        start = time.monotonic()
        with self._tokens(system):
            pl.slicing.causal_attention(q, k, v, self).sum().backward()
        return start, time.monotonic()

    @contextmanager
    def _tokens(self, system: System) -> Iterator[None]:
        parts = self._pipe.executor.batching.parts
        if parts is None:
            yield
            return
        with parts.tokens({"length": self._size.sequence}).current():
            yield

    def _waited(self) -> float:
        return sum(traffic.seconds for traffic in self._mesh.meter.traffic.values())

    def close(self) -> None:
        self._pipe.close()
        self._mesh.close()
