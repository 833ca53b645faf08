"""What a pipeline is compared with: plain gradient accumulation in one process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipeloom.models import GPT, GPTConfig, init_parameters
from pipeloom.models import loss_fn as language_loss

__all__ = ["Checkpointed", "accumulate", "checkpoint_blocks", "language_loss", "make_gpt", "make_mlp", "tokens"]


def make_mlp(depth: int = 6, width: int = 8, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A chain of `depth` small layers, always with the same values."""
    generator = torch.Generator().manual_seed(depth)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) / width**0.5)
    return model


def make_gpt(*, tied: bool = False, layers: int = 4, dtype: torch.dtype = torch.float32) -> GPT:
    """A GPT of a few thousand parameters, always with the same values."""
    config = GPTConfig(vocabulary_size=32, layers=layers, width=16, heads=2, sequence_length=12, tie_embeddings=tied)
    model = GPT(config)
    init_parameters(model, seed=5)
    return model.to(dtype)


class Checkpointed(nn.Module):
    """`inner` under activation checkpointing; counts how often it runs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x):
        def run(value):
            self.calls += 1
            return self.inner(value)

        return checkpoint(run, x, use_reentrant=False)


def checkpoint_blocks(model: GPT) -> None:
    """Put every block of a GPT under activation checkpointing."""
    model.blocks = nn.ModuleList(Checkpointed(block) for block in model.blocks)


def tokens(batch: int, length: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets [batch, length] for `make_gpt`."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, 32, (batch, length + 1), generator=generator)
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def accumulate(model: nn.Module, loss_fn, inputs: Tensor, targets: Tensor, num_microbatches: int) -> Tensor:
    """Forward and backward of one micro-batch after the other; the loss is the mean over all samples."""
    total = torch.zeros((), dtype=next(model.parameters()).dtype, device=inputs.device)
    for x, y in zip(inputs.tensor_split(num_microbatches), targets.tensor_split(num_microbatches), strict=True):
        loss = loss_fn(model(x), y) * (len(x) / len(inputs))
        loss.backward()
        total += loss.detach()
    return total
