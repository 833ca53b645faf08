"""`Architecture`: the sizes of a decoder-only transformer, by name or from a JSON file. No torch here.

    {"name": "llama3-405b", "layers": 126, "width": 16384, "heads": 128, "key_heads": 8, "mlp_width": 53248,
     "gated": true, "vocabulary_size": 128256, "sequence_length": 8192, "norm": "rms"}

Optional keys: `key_heads` (default `heads`), `mlp_width` (4 width), `gated`, `norm` ("layer" or "rms"), `positions`
("rotary" or "learned"), `biases` and `tie_embeddings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, cast

from pipeloom.common.json_reader import Entry, parse_file, read_json
from pipeloom.errors import InputError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.parallel.traffic import LayerSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer: an embedding, equal blocks of attention and an MLP, a norm, and a head.

    Attributes:
        name: shown in output.
        layers: number of blocks.
        width: of the residual stream.
        heads, key_heads: query heads, and key and value heads; of width / heads each.
        mlp_width: of the MLP.
        gated: whether the MLP has two matrices of width x mlp_width, as SwiGLU (arXiv:2002.05202).
        vocabulary_size: number of token ids.
        sequence_length: tokens per sample.
        norm: "layer" (mean and variance) or "rms".
        positions: "rotary" or "learned".
        biases: whether linear layers and layer norms have biases.
        tie_embeddings: whether head and embedding share their weight.
        dropout: dropout probability.

    Raises:
        InputError: a size is less than 1, or heads do not divide width or key heads do not divide heads.
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

    def __post_init__(self) -> None:
        sizes = ("layers", "width", "heads", "key_heads", "mlp_width", "vocabulary_size", "sequence_length")
        for name in sizes:
            if getattr(self, name) < 1:
                raise InputError(f"model {name}={getattr(self, name)}: must be at least 1.")
        for name, of in (("heads", "width"), ("key_heads", "heads")):
            part, whole = getattr(self, name), getattr(self, of)
            if whole % part:
                fits = [n for n in range(1, part) if whole % n == 0]
                raise InputError(f"model {name}={part}: must divide {of}={whole}. Use {fits[-1]}.")

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
        )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def qkv_features(self) -> int:
        """Rows of the queries, keys and values together."""
        return (self.heads + 2 * self.key_heads) * self.head_width

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
        )


NAMED: Mapping[str, Architecture] = {
    each.name: each
    for each in (
        Architecture(  # arXiv:2005.14165, table 2.1
            name="gpt3-175b",
            layers=96,
            width=12288,
            heads=96,
            key_heads=96,
            mlp_width=4 * 12288,
            vocabulary_size=50257,
            sequence_length=2048,
            positions="learned",
            biases=True,
            tie_embeddings=True,
        ),
        Architecture(  # arXiv:2407.21783, table 3
            name="llama3-405b",
            layers=126,
            width=16384,
            heads=128,
            key_heads=8,
            mlp_width=53248,
            gated=True,
            vocabulary_size=128256,
            sequence_length=8192,
            norm="rms",
        ),
    )
}

_REQUIRED = ("layers", "width", "heads", "vocabulary_size", "sequence_length")
_WORDS = {"norm": ("layer", "rms"), "positions": ("rotary", "learned")}
_FLAGS = ("gated", "biases", "tie_embeddings")


def find_architecture(name: str, option: str) -> Architecture:
    """The named architecture, or the one in the JSON file `name`.

    Args:
        option: that names it, for error messages.

    Raises:
        InputError: neither a known name nor a readable file, or a wrong value in the file.
    """
    if name in NAMED:
        return NAMED[name]
    if not name.endswith(".json"):
        raise InputError(f"{option}={name}: must be {', '.join(NAMED)}, or a JSON file whose name ends in .json.")
    return parse_file(option, name, parse_architecture)


def parse_architecture(text: str) -> Architecture:
    """Read the JSON of an architecture.

    Raises:
        InputError: invalid JSON or a wrong value; the message names the key and the rule.
    """
    source = read_json(text, "the model file", "an object with layers, width, heads, ...")
    entries = source.fields(_REQUIRED, ("name", "key_heads", "mlp_width", *_WORDS, *_FLAGS))
    sizes = {name: entry.whole(least=1) for name, entry in entries.items() if name not in ("name", *_WORDS, *_FLAGS)}
    words = {name: _word(entries[name], known) for name, known in _WORDS.items() if name in entries}
    flags = {name: entries[name].flag() for name in _FLAGS if name in entries}
    name = entries["name"].text() if "name" in entries else "model"
    sizes = {"key_heads": sizes["heads"], "mlp_width": 4 * sizes["width"], **sizes}
    return Architecture(
        name=name,
        norm=cast("Literal['layer', 'rms']", words.get("norm", "layer")),
        positions=cast("Literal['rotary', 'learned']", words.get("positions", "rotary")),
        **cast("dict[str, Any]", sizes | flags),
    )


def _word(entry: Entry, known: tuple[str, ...]) -> str:
    if entry.text() not in known:
        entry.refuse(f"must be {' or '.join(known)}")
    return entry.text()
