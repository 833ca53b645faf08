"""The configuration of the small GPT. Needs no torch."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from pipeloom.common.division import divisors
from pipeloom.common.field_types import check_fields
from pipeloom.errors import InputError
from pipeloom.models.experts.settings import ROUTERS, CapacityGroup, ExpertSettings, RouterName

_OF_EXPERTS = frozenset(
    {
        *("experts_every", "router", "top_k", "capacity_factor", "capacity_by", "shared_experts", "expert_width"),
        *("balance_weight", "z_loss_weight"),
    }
)


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
        experts: number of experts in place of a block's MLP; 0: none.
        experts_every: block i has experts if (i + 1) is a multiple of it.
        router, top_k, capacity_factor, capacity_by, shared_experts, balance_weight, z_loss_weight: see
            `pipeloom.models.experts.Experts`.
        expert_width: width inside an expert; None: mlp_ratio * width.

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
    experts: int = 0
    experts_every: int = 1
    router: RouterName = "topk"
    top_k: int | None = None
    capacity_factor: float | None = None
    capacity_by: CapacityGroup = "batch"
    shared_experts: int = 0
    expert_width: int | None = None
    balance_weight: float | None = None
    z_loss_weight: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("vocabulary_size", "layers", "width", "heads", "sequence_length", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise InputError(f"model {name}={getattr(self, name)}: must be at least 1.")
        if self.width % self.heads:
            fix = min(divisors(self.width), key=lambda h: (abs(h - self.heads), h))
            raise InputError(f"model width={self.width} is not a multiple of heads={self.heads}. Use heads={fix}.")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            fix = max(k for k in divisors(self.heads) if k <= max(1, self.kv_heads))
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
        self._check_experts()

    def _check_experts(self) -> None:
        if self.experts < 0:
            raise InputError(f"model experts={self.experts}: must be 0 (no experts) or more.")
        if self.experts == 0:
            for each in fields(self):
                if each.name in _OF_EXPERTS and getattr(self, each.name) != each.default:
                    raise InputError(
                        f"model {each.name}={getattr(self, each.name)}: has no effect without experts. Set experts, or "
                        f"remove {each.name}."
                    )
            return
        if not 1 <= self.experts_every <= self.layers:
            raise InputError(
                f"model experts_every={self.experts_every}: must be from 1 to layers={self.layers}, else no block has "
                "experts. Use 1 or 2."
            )
        for name, least in (("shared_experts", 0), ("expert_width", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(f"model {name}={value}: must be at least {least}.")
        try:
            ExpertSettings.of(**self.expert_settings)
        except InputError as error:
            raise InputError(f"model {error}") from None

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
    def expert_settings(self) -> dict[str, Any]:
        """The arguments of `ExpertSettings.of`."""
        names = ("experts", "router", "top_k", "capacity_factor", "capacity_by", "balance_weight", "z_loss_weight")
        return {name: getattr(self, name) for name in names}

    @property
    def width_of_expert(self) -> int:
        """Width inside an expert."""
        return self.mlp_ratio * self.width if self.expert_width is None else self.expert_width

    def has_experts(self, block: int) -> bool:
        """Whether the block of this index has experts."""
        return self.experts > 0 and (block + 1) % self.experts_every == 0

    @property
    def num_mixtures(self) -> int:
        """Number of blocks with experts."""
        return self.layers // self.experts_every if self.experts else 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones count once."""
        rows_qkv = sum(rows for rows, _ in self.qkv_sections)
        block = (self.width + rows_qkv) * self.width + 2 * self.width
        mixtures = self.num_mixtures
        mlps = (self.layers - mixtures) * 2 * self.mlp_ratio * self.width**2
        routers = ROUTERS[self.router].matrices * self.experts
        beside = mixtures * (2 * self.shared_experts * self.width_of_expert + routers) * self.width
        tables = self.vocabulary_size * (1 if self.tie_embeddings else 2)
        tables += self.sequence_length if self.positions == "learned" else 0
        return self.layers * block + mlps + self.num_expert_parameters + beside + (tables + 1) * self.width

    @property
    def num_expert_parameters(self) -> int:
        """Number of parameters of the experts that tokens are routed to, of all blocks."""
        return self.num_mixtures * 2 * self.experts * self.width_of_expert * self.width
