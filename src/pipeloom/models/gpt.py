# ruff: noqa: N803  # shapes are part of the names
"""A small GPT: pre-norm blocks, causal attention, rotary or learned positions. And initial values of parameters.

    embedding ── blocks.0 ── ... ── blocks.L-1 ── norm ── head        in this order: `GPT.pipeline_layers`

The model supports slices of a sequence (see `pipeloom.slicing`).

Shapes: B batch, S tokens of the sequence or slice, W width, H heads, D = W / H, V vocabulary, T = B * S.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeloom.errors import InputError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.slicing import causal_attention, current_slice, dropout
from pipeloom.slicing.context import hashed

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # prefixes of torch.compile and checkpointing, ignored
_STD = 0.02  # GPT-2's


class Embedding(nn.Module):
    """Token ids [B, S] of any integer type -> [B, S, W]."""

    sliceable = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocabulary_size, config.width))
        learned = config.positions == "learned"
        self.positions = nn.Parameter(torch.empty(config.sequence_length, config.width)) if learned else None
        self.sequence_length = config.sequence_length
        self.dropout = config.dropout

    def forward(self, tokens_BS: Tensor) -> Tensor:
        piece = current_slice()
        start, length = (piece.start, piece.length) if piece else (0, tokens_BS.shape[1])
        if length > self.sequence_length:
            raise InputError(
                f"a sequence of {length} tokens is longer than sequence_length={self.sequence_length} of the model. "
                "Shorten it, or increase sequence_length."
            )
        x_BSW = F.embedding(tokens_BS.long(), self.weight)
        if self.positions is not None:
            x_BSW = x_BSW + self.positions[start : start + tokens_BS.shape[1]]
        return dropout(x_BSW, self.dropout, self) if self.training else x_BSW


class Rotary(nn.Module):
    """Rotates the pairs (i, i + D/2) of queries and keys by position * 10000^(-2i/D); leaves values unchanged.

    The tables are [S, 3, 1, D], which rotates the fused queries, keys and values in one operation. This saves kernel
    launches at small sizes, and costs little of a block's time at large ones.
    """

    sliceable = True
    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.shape = (config.sequence_length, config.head_width)
        for name, table in zip(("cos", "sin"), self._tables(None), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _tables(self, device: torch.device | None) -> tuple[Tensor, Tensor]:
        length, width = self.shape
        half = torch.arange(width // 2, dtype=torch.float64, device=device)
        angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), 10000.0 ** (-2.0 * half / width))
        cos, sin = angle.cos(), angle.sin()
        rotated_cos, rotated_sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        cos_S31D = torch.stack([rotated_cos, rotated_cos, torch.ones_like(rotated_cos)], 1).unsqueeze(2)
        sin_S31D = torch.stack([rotated_sin, rotated_sin, torch.zeros_like(rotated_sin)], 1).unsqueeze(2)
        return cos_S31D.to(torch.get_default_dtype()), sin_S31D.to(torch.get_default_dtype())

    def reset_buffers(self) -> None:
        """Recompute the tables, on their device and in their dtype."""
        for buffer, table in zip((self.cos, self.sin), self._tables(self.cos.device), strict=True):
            buffer.copy_(table)

    def forward(self, qkv_BS3HD: Tensor) -> Tensor:
        cos, sin, piece = self.cos, self.sin, current_slice()
        start, length = piece.start if piece else 0, qkv_BS3HD.shape[1]
        if length != self.shape[0]:
            cos, sin = cos[start : start + length], sin[start : start + length]
        return torch.addcmul(qkv_BS3HD * cos, qkv_BS3HD.roll(self.shape[1] // 2, -1), sin)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)): [B, S, W] -> [B, S, W]."""

    sliceable = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.rotary = Rotary(config) if config.positions == "rotary" else None
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_up = nn.Linear(width, config.mlp_ratio * width, bias=False)
        self.mlp_down = nn.Linear(config.mlp_ratio * width, width, bias=False)
        self.heads = config.heads
        self.dropout = config.dropout
        # GPT-2: layers that add to the residual stream are scaled by 1 / sqrt(number of additions).
        self.init_std = dict.fromkeys(("attention_out", "mlp_down"), 0.02 / (2 * config.layers) ** 0.5)

    def forward(self, x_BSW: Tensor) -> Tensor:
        B, S, W = x_BSW.shape
        x_TW = x_BSW.reshape(B * S, W)
        qkv_BS3HD = self.qkv(self.attention_norm(x_TW)).view(B, S, 3, self.heads, W // self.heads)
        if self.rotary is not None:
            qkv_BS3HD = self.rotary(qkv_BS3HD)
        q_BHSD, k_BHSD, v_BHSD = qkv_BS3HD.permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        a_BHSD = causal_attention(q_BHSD, k_BHSD, v_BHSD, self, dropout_p=p)
        a_TW = self.attention_out(a_BHSD.transpose(1, 2).reshape(B * S, W))
        x_TW = x_TW + (dropout(a_TW.view(B, S, W), p, (self, "attention")).view(B * S, W) if p else a_TW)
        m_TW = self.mlp_down(F.gelu(self.mlp_up(self.mlp_norm(x_TW))))
        x_TW = x_TW + (dropout(m_TW.view(B, S, W), p, (self, "mlp")).view(B * S, W) if p else m_TW)
        return x_TW.view(B, S, W)


class GPT(nn.Module):
    """Token ids [B, S] -> logits [B, S, V].

    Parameters are uninitialized: call `pipeloom.models.init_parameters`, or build the model on the meta device and call
    `pipeloom.models.materialize` for each stage on its rank.
    """

    sliceable = True
    pipeline_layers = ("embedding", "blocks.*", "norm", "head")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSW: Tensor = self.embedding(tokens_BS)
        for block in self.blocks:
            x_BSW = block(x_BSW)
        logits_BSV: Tensor = self.head(self.norm(x_BSW))
        return logits_BSV


def loss_fn(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross-entropy over all tokens, in nats; `targets_BS` has any integer dtype."""
    return F.cross_entropy(logits_BSV.flatten(0, -2), targets_BS.flatten().long())


@torch.no_grad()
def init_parameters(module: nn.Module, *, seed: int) -> None:
    """Initialize every parameter with a generator seeded with (`seed`, canonical name).

    Matrices are normal with standard deviation 0.02, or ``init_std[child]`` of the enclosing module; biases are 0,
    other vectors (the gains of norms) 1. Values are drawn on the CPU in float32, so they do not depend on
    split, device and dtype. Names of tied parameters are looked up in ``module.canonical_names``.
    """
    canonical: dict[str, str] = getattr(module, "canonical_names", {})
    parents = dict(module.named_modules())
    for name, parameter in module.named_parameters():
        path, _, last = name.rpartition(".")
        parent, _, child = path.rpartition(".")
        stds: dict[str, float] = getattr(parents.get(parent), "init_std", {})
        if parameter.ndim < 2:
            parameter.fill_(0.0 if last.endswith("bias") else 1.0)
        else:
            key = canonical.get(name, name)
            for wrapper in _WRAPPERS:
                key = key.replace(wrapper, "")
            draw, std = torch.Generator().manual_seed(hashed(seed, key)), stds.get(child, _STD)
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=draw))


@torch.no_grad()
def materialize(module: nn.Module, seed: int, device: torch.device | str = "cpu") -> None:
    """Move a stage that was built on the meta device to `device` and initialize it. Tied parameters stay tied.

    Buffers on the meta device are recomputed by ``reset_buffers()`` of their module (or ``reset_running_stats()`` of
    BatchNorm); other buffers are moved with their values.

    Raises:
        InputError: the module of a buffer on the meta device has no such method.
    """
    new: dict[int, nn.Parameter] = {}
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in new:
                    new[id(parameter)] = nn.Parameter(
                        torch.empty_like(parameter, device=device), parameter.requires_grad
                    )
                part._parameters[name] = new[id(parameter)]
        lost = [name for name, buffer in part._buffers.items() if buffer is not None and buffer.is_meta]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        if lost:
            reset: Any = getattr(part, "reset_buffers", None) or getattr(part, "reset_running_stats", None)
            if reset is None:
                raise InputError(
                    f"buffer {f'{path}.{lost[0]}'.lstrip('.')!r} is on the meta device and has no values. "
                    f"Give {type(part).__name__} a method reset_buffers() that computes them."
                )
            reset()
    init_parameters(module, seed=seed)
