"""What runs in each process: steps of one sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import pipeloom as pl
from pipeloom.autograd.saved_bytes import SavedBytes
from pipeloom.models import GPT, GPTConfig, init_parameters, loss_fn

NUM_RANKS = 2
WHOLE = "1f1b"


class Cut(NamedTuple):
    """A system under test."""

    schedule: str
    slices: int | None  # so many even ones; None: the best lengths


SYSTEMS = {
    "gpipe": Cut("gpipe", 1),
    WHOLE: Cut(WHOLE, 1),
    "terapipe, 8 slices": Cut("terapipe", 8),
    **{f"seq1f1b, {k} slices": Cut("seq1f1b", k) for k in (4, 8, 16)},
    "seq1f1b, best slices": Cut("seq1f1b", None),
}


def config(sequence: int) -> GPTConfig:
    return GPTConfig(vocabulary_size=256, layers=8, width=256, heads=8, sequence_length=sequence)


def build(sequence: int) -> GPT:
    model = GPT(config(sequence))
    init_parameters(model, seed=0)
    return model


def batch(sequence: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (1, sequence + 1), generator=torch.Generator().manual_seed(11))
    return tokens[:, :-1], tokens[:, 1:]


class Subject:
    """One rank of a crew."""

    def __init__(self, rank: int, sequence: int) -> None:
        self._sequence = sequence
        self._pipe: pl.Pipeline

    def build(self, cut: Cut, lengths: Sequence[int] | None, reference: str) -> tuple[float, float, int]:
        """The largest error, and the peak of live activations in rank-shares and in bytes."""
        num_slices = len(lengths) if lengths is not None else cut.slices or 1
        schedule = pl.schedules.build(cut.schedule, num_ranks=NUM_RANKS, num_microbatches=1, num_slices=num_slices)
        self._pipe = pl.Pipeline(build(self._sequence), schedule, loss_fn=loss_fn, slices=lengths)
        kept = SavedBytes(self._pipe.parameters())
        with kept.counting():
            loss = self._pipe.step(*batch(self._sequence))
        expected = load_file(reference)
        errors = [abs(float(loss - expected["loss"])) / float(expected["loss"])]
        for name, parameter in self._pipe.named_parameters():
            assert parameter.grad is not None, name
            error = (parameter.grad - expected[name]).abs().max() / expected[name].abs().max()
            errors.append(float(error))
        (live,) = self._pipe.memory.peak_live_activations.values()
        return max(errors), live / num_slices, kept.peak

    def step(self) -> tuple[float, float]:
        """When the step began and ended, by a clock that all ranks share."""
        for parameter in self._pipe.parameters():
            parameter.grad = None
        dist.barrier()
        start = time.monotonic()
        self._pipe.step(*batch(self._sequence))
        return start, time.monotonic()

    def close(self) -> None:
        self._pipe.close()
