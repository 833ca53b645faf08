"""The configuration of the small GPT. Needs no torch."""

from dataclasses import dataclass
from typing import Literal

from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a GPT.

    Args:
        vocabulary_size: number of token ids; 256 for bytes.
        layers: number of blocks.
        width: width of the residual stream; a multiple of `heads`.
        heads: number of attention heads (query heads).
        kv_heads: number of key and value heads, each shared by heads / kv_heads query heads (grouped queries,
            arXiv:2305.13245); None: one per query head.
        sequence_length: maximum sequence length in tokens.
        tie_embeddings: whether the head shares the weight of the embedding.
        positions: "rotary" rotates queries and keys (arXiv:2104.09864); "learned" adds position embeddings.
        dropout: dropout probability of the embedding, the attention weights and both branches of a block.
        mlp_ratio: width of the MLP divided by `width`.

    Raises:
        InputError: a value is out of range.
    """

    vocabulary_size: int = 256
    layers: int = 6
    width: int = 192
    heads: int = 6
    sequence_length: int = 128
    tie_embeddings: bool = True
    positions: Literal["rotary", "learned"] = "rotary"
    dropout: float = 0.0
    mlp_ratio: int = 4
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("vocabulary_size", "layers", "width", "heads", "sequence_length", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise InputError(f"model {name}={getattr(self, name)}: must be at least 1.")
        if self.width % self.heads:
            divisors = (h for h in range(1, self.width + 1) if self.width % h == 0)
            fix = min(divisors, key=lambda h: (abs(h - self.heads), h))
            raise InputError(f"model width={self.width} is not a multiple of heads={self.heads}. Use heads={fix}.")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            fix = max(k for k in range(1, self.heads + 1) if self.heads % k == 0 and k <= max(1, self.kv_heads))
            raise InputError(
                f"model kv_heads={self.kv_heads}: must be at least 1 and divide heads={self.heads}. Use kv_heads={fix}."
            )
        if self.positions == "rotary" and self.head_width % 2:
            raise InputError(
                f"model width={self.width} and heads={self.heads} give a head width of {self.head_width}: "
                "rotary positions need an even one. Change heads, or use positions='learned'."
            )
        if not 0 <= self.dropout < 1:
            raise InputError(f"model dropout={self.dropout}: must be a probability >= 0 and < 1.")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Number of key heads, and of value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def qkv_sections(self) -> tuple[tuple[int, int], ...]:
        """Rows and heads of the queries, keys and values in a block's `qkv`."""
        keys = (self.key_heads * self.head_width, self.key_heads)
        return (self.width, self.heads), keys, keys

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        rows_qkv = sum(rows for rows, _ in self.qkv_sections)
        block = ((1 + 2 * self.mlp_ratio) * self.width + rows_qkv) * self.width + 2 * self.width
        tables = self.vocabulary_size * (1 if self.tie_embeddings else 2)
        tables += self.sequence_length if self.positions == "learned" else 0
        return self.layers * block + (tables + 1) * self.width
