"""`Architecture`: the sizes of a decoder-only transformer. No torch here."""

from dataclasses import dataclass
from typing import Literal, Self

from pipeloom.errors import InputError, folded
from pipeloom.models.experts.settings import ExpertSettings
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.parallel.traffic import LayerSizes

_SIZES = (
    *("layers", "width", "heads", "key_heads", "mlp_width", "vocabulary_size", "sequence_length"),
    "experts_every",
)
_MOST_TRIED = 1 << 14  # divisors, for a hint
_MOST, _MOST_LAYERS = 1 << 40, 10_000  # larger sizes are mistakes, and would overflow; more layers would take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: an embedding, blocks of attention and an MLP or experts, a norm, and a head.

    Attributes:
        name: shown in output.
        layers: number of blocks.
        width: of the residual stream.
        heads, key_heads: query heads, and key and value heads.
        mlp_width: of the MLP.
        gated: whether the MLP has two matrices of width x mlp_width, as SwiGLU (arXiv:2002.05202).
        vocabulary_size: number of token ids.
        sequence_length: tokens per sample.
        norm: "layer" (mean and variance) or "rms".
        positions: "rotary" or "learned".
        biases: whether linear layers and layer norms have biases.
        tie_embeddings: whether head and embedding share their weight.
        dropout: dropout probability.
        given_head_width: of each head; None: width / heads.
        experts: of blocks that have experts in place of an MLP; None: no block has.
        experts_every: block i has experts if `experts_every` divides i + 1, and it is none of the first
            `dense_blocks`.

    Raises:
        InputError: a size is less than 1 or far too large, heads do not divide width, key heads do not divide heads, or
            there are fewer experts than a token has.
    """

    name: str
    layers: int
    width: int
    heads: int
    key_heads: int
    mlp_width: int
    gated: bool = False
    vocabulary_size: int
    sequence_length: int
    norm: Literal["layer", "rms"] = "layer"
    positions: Literal["rotary", "learned"] = "rotary"
    biases: bool = False
    tie_embeddings: bool = False
    dropout: float = 0.0
    given_head_width: int | None = None
    experts: ExpertSizes | None = None
    experts_every: int = 1
    dense_blocks: int = 0

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise InputError(f"model {name}={getattr(self, name)}: must be at least 1.")
        self._check_most()
        if self.experts is not None and not 0 < self.experts.top_k <= self.experts.experts:
            raise InputError(
                f"model top_k={self.experts.top_k}: must be above 0 and at most experts={self.experts.experts}. Change "
                "one of them."
            )
        for name, of in (("heads", "width"), ("key_heads", "heads")):
            if name == "heads" and self.given_head_width is not None:
                continue
            part, whole = getattr(self, name), getattr(self, of)
            if whole % part:
                first = min(part - 1, whole)
                tried = range(first, max(first - _MOST_TRIED, 0), -1)
                fit = next((n for n in tried if whole % n == 0), 1)
                raise InputError(f"model {name}={folded(part)}: must divide {of}={folded(whole)}. Use {fit}.")

    def _check_most(self) -> None:
        """Raises InputError for a size that is too large."""
        found = {name: getattr(self, name) for name in _SIZES} | {"head_width": self.given_head_width or 1}
        if self.experts is not None:
            found |= {name: getattr(self.experts, name) for name in ("experts", "expert_width", "shared")}
        for name, value in found.items():
            most = _MOST_LAYERS if name == "layers" else _MOST
            if value > most:
                raise InputError(f"model {name}={folded(value)}: must be at most {most:,}.")

    @classmethod
    def of_gpt(cls, sizes: GPTConfig) -> Self:
        """Pipeloom's GPT."""
        return cls(
            name="gpt",
            layers=sizes.layers,
            width=sizes.width,
            heads=sizes.heads,
            key_heads=sizes.key_heads,
            mlp_width=sizes.mlp_ratio * sizes.width,
            vocabulary_size=sizes.vocabulary_size,
            sequence_length=sizes.sequence_length,
            positions=sizes.positions,
            tie_embeddings=sizes.tie_embeddings,
            dropout=sizes.dropout,
            experts=_experts_of(sizes) if sizes.experts else None,
            experts_every=sizes.experts_every,
        )

    @property
    def head_width(self) -> int:
        return self.width // self.heads if self.given_head_width is None else self.given_head_width

    @property
    def attention_width(self) -> int:
        """Features of the queries, and of the output of attention."""
        return self.heads * self.head_width

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts in place of an MLP."""
        return self.experts is not None and block >= self.dense_blocks and (block + 1) % self.experts_every == 0

    @property
    def kinds(self) -> int:
        """So many of the first blocks have all kinds of blocks."""
        return min(self.layers, self.dense_blocks + self.experts_every)

    @property
    def qkv_features(self) -> int:
        """Rows of the queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.head_width

    def block_numbers(self, *, experts: bool, all_experts: bool = False) -> int:
        """Numbers in the matrices of a block, of which each multiplies every token.

        Args:
            experts: whether the block has experts; `top_k` of them, and shared ones, count.
            all_experts: whether all experts count instead.
        """
        attention = self.width * (self.qkv_features + self.attention_width)
        if not experts:
            return attention + (3 if self.gated else 2) * self.width * self.mlp_width
        assert self.experts is not None
        active = self.experts.shared + (self.experts.experts if all_experts else self.experts.top_k)
        router = self.experts.router_matrices * self.experts.experts * self.width
        return attention + router + round(active * self.experts.matrix_numbers(self.width))

    def layer_sizes(self, samples: int, element: int) -> LayerSizes:
        """Sizes that formulae of traffic need, of a micro-batch of `samples` with `element` bytes per number."""
        return LayerSizes(
            samples=samples,
            sequence_length=self.sequence_length,
            width=self.width,
            heads=self.heads,
            key_heads=self.key_heads,
            head_width=self.head_width,
            mlp_width=self.mlp_width,
            gated=self.gated,
            centered=self.norm == "layer",
            vocabulary_size=self.vocabulary_size,
            element=element,
            experts=self.experts,
        )


def _experts_of(sizes: GPTConfig) -> ExpertSizes:
    """The experts of pipeloom's GPT."""
    settings = ExpertSettings.of(**sizes.expert_settings)
    top_k: float = settings.top_k
    factor = settings.capacity_factor
    if settings.router == "expert-choice":  # the factor is the mean number of experts per token
        top_k, factor = min(settings.experts, top_k if factor is None else factor), 1.0
    return ExpertSizes(
        experts=sizes.experts,
        top_k=top_k,
        expert_width=sizes.width_of_expert,
        shared=sizes.shared_experts,
        capacity_factor=factor,
        by_sequence=settings.capacity_by == "sequence",
        router=settings.router,
        z_loss=settings.z_loss_weight > 0,
    )
