"""Small models whose layers are no chain, with what a step of each takes: used by the tests of traced models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.BatchNorm2d(outside)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.norm(self.conv(x)), inplace=True))


class UNet(nn.Module):
    """Two levels, whose outputs skip to the way up; keeps the size of its input."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.down = nn.ModuleList([Block(1, 4, dropout), Block(4, 6, dropout)])
        self.middle = Block(6, 6)
        self.up = nn.ModuleList([Block(12, 4, dropout), Block(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, kept.pop()], 1))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Block(inside, outside), nn.Conv2d(outside, outside, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 or inside != outside else None

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.short is None else self.short(x)
        return torch.relu_(self.norm(self.second(self.first(x))) + kept)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = Block(1, 4)
        self.layers = nn.Sequential(Residual(4, 4, 1), Residual(4, 6, 2), Residual(6, 6, 1), Residual(6, 8, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1), 1))


class TwoTowers(nn.Module):
    """The second tower, and the weights, read inputs that earlier stages have no use for; a dict comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.right = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.arange(8.0) / 8, persistent=False)

    def forward(self, left: Tensor, right: Tensor, *, weight: Tensor | None = None) -> dict[str, Any]:
        a = self.left(left)
        b = self.right(right).mean(1) * self.scale + self.shift
        score = (a * b).sum(-1)
        return {"score": score if weight is None else score * weight, "left": a, "name": "two"}


class Seq2Seq(nn.Module):
    """An encoder whose output every layer of the decoder reads; tied embeddings; the length is free."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        settings = {"dropout": dropout, "batch_first": True, "dim_feedforward": 12}
        self.embed = nn.Embedding(13, 8)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, **settings) for _ in range(1)])
        self.decoder = nn.ModuleList([nn.TransformerDecoderLayer(8, 2, **settings) for _ in range(2)])
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.embed(target)
        length = target.shape[1]
        mask = torch.triu(torch.full((length, length), -1e9, dtype=x.dtype), 1)
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=mask)
        return self.head(x)


class Mixture(nn.Module):
    """Two blocks of experts; the position of a token chooses its expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.experts = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]) for _ in range(2)])
        self.gate = nn.Linear(8, 3)
        self.head = nn.Linear(8, 9)

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        for block in self.experts:
            gates = torch.softmax(self.gate(first), -1)
            chosen = torch.arange(tokens.shape[1], device=x.device) % 3
            every = torch.stack([F.gelu(expert(x)) * gates[..., i : i + 1] for i, expert in enumerate(block)])
            x = x + (every * F.one_hot(chosen, 3).to(x.dtype).T[:, None, :, None]).sum(0)
        return self.head(x)


def score_loss(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return F.mse_loss(output["score"], target) + output["left"].square().mean()


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def case(name: str, num_samples: int) -> tuple[nn.Module, Any, Tensor, Any]:
    """A model in float64, a batch of inputs and targets, and the loss."""
    torch.manual_seed(num_samples)
    images = torch.randn(num_samples, 1, 8, 8, dtype=torch.float64)
    ids = torch.randint(0, 9, (num_samples, 6))
    left, score = torch.randn(num_samples, 5, dtype=torch.float64), torch.randn(num_samples, dtype=torch.float64)
    weight = torch.rand(num_samples, dtype=torch.float64)
    found: dict[str, tuple[Any, Any, Tensor, Any]] = {
        "unet": (UNet, images, images.roll(1, 0), F.mse_loss),
        "resnet": (ResNet, images, torch.arange(num_samples) % 3, F.cross_entropy),
        "towers": (TwoTowers, ((left, ids), {"weight": weight}), score, score_loss),
        "seq2seq": (Seq2Seq, {"source": ids, "target": ids.flip(1)[:, :4]}, ids[:, :4], token_loss),
        "mixture": (Mixture, ids, ids.roll(1, 1), token_loss),
    }
    kind, inputs, targets, loss_fn = found[name]
    return kind().double(), inputs, targets, loss_fn


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a batch in any of its forms."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple):
        return model(*inputs[0], **inputs[1])
    return model(inputs)
