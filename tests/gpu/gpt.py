"""A GPT on the device under test, its batch, and gradient accumulation beside a pipeline."""

from __future__ import annotations

import torch
from torch import Tensor

import pipeloom as pl
from pipeloom.models import GPT, GPTConfig, init_parameters
from tests.cpu.reference import accumulate, language_loss, make_gpt, tokens

CUDA = "cuda:0"
F64 = torch.float64


def small(*, tied: bool = False) -> GPT:
    """A few thousand parameters in float64, always with the same values."""
    return make_gpt(tied=tied, dtype=F64).to(CUDA)


def batch(num_samples: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs and targets of `small`."""
    return tuple(values.to(CUDA) for values in tokens(num_samples, seed=seed))


def larger(layers: int = 8, width: int = 256, dropout: float = 0.0) -> GPT:
    """A GPT of float32 whose activations and states are some MiB; vocabulary 256, 256 positions."""
    model = GPT(
        GPTConfig(layers=layers, width=width, heads=8, sequence_length=256, tie_embeddings=False, dropout=dropout)
    )
    init_parameters(model, seed=0)
    return model.to(CUDA)


def larger_batch(num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `larger`."""
    generator = torch.Generator().manual_seed(num_samples)
    row = torch.randint(0, 256, (num_samples, 257), generator=generator).to(CUDA)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def check_step(pipe: pl.Pipeline, expected: GPT, num_samples: int, *, rtol: float = 0.0) -> None:
    """One step of a pipeline that trains `small`, beside accumulation in `expected`; `rtol` 0: bitwise."""
    inputs, targets = batch(num_samples)
    wanted = accumulate(expected, language_loss, inputs, targets, pipe.schedule.num_microbatches)
    torch.testing.assert_close(pipe.step(inputs, targets), wanted, rtol=rtol, atol=0)
    parameters = dict(expected.named_parameters())
    for name, parameter in pipe.named_parameters():
        grad, atol = parameters[name].grad, 1e-14 if rtol else 0
        torch.testing.assert_close(parameter.grad, grad, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
