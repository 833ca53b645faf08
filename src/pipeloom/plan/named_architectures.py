"""Transformers by name, or from a JSON file. No torch here.

    {"name": "llama3-405b", "layers": 126, "width": 16384, "heads": 128, "key_heads": 8, "mlp_width": 53248,
     "gated": true, "vocabulary_size": 128256, "sequence_length": 8192, "norm": "rms"}

Optional keys: `key_heads` (default `heads`), `head_width` (width / heads), `mlp_width` (4 width), `gated`, `norm`
("layer" or "rms"), `positions` ("rotary" or "learned"), `biases` and `tie_embeddings`. A mixture of experts also has
`experts` and `top_k`, and optionally `experts_every` (1), `dense_blocks` (0: first blocks without experts),
`expert_width` (`mlp_width`), `expert_gated` (`gated`), `shared_experts` (0) and `capacity_factor` (none).
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from pipeloom.common.json_reader import Entry, parse_file, read_json
from pipeloom.errors import InputError
from pipeloom.parallel.expert.sizes import ExpertSizes
from pipeloom.plan.architecture import Architecture

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
        Architecture(  # arXiv:2401.04088, table 1
            name="mixtral-8x7b",
            layers=32,
            width=4096,
            heads=32,
            key_heads=8,
            mlp_width=14336,
            gated=True,
            vocabulary_size=32000,
            sequence_length=32768,
            norm="rms",
            experts=ExpertSizes(experts=8, top_k=2, expert_width=14336, gated=True),
        ),
        Architecture(  # arXiv:2112.06905, table 4: 64B/64E; its dense MLPs are gated. Position biases are left out.
            name="glam-64b",
            layers=64,
            width=8192,
            heads=128,
            key_heads=128,
            given_head_width=128,
            mlp_width=32768,
            gated=True,
            vocabulary_size=256000,
            sequence_length=1024,
            tie_embeddings=True,
            experts=ExpertSizes(experts=64, top_k=2, expert_width=32768, capacity_factor=1.25),
            experts_every=2,
        ),
    )
}

_REQUIRED = ("layers", "width", "heads", "vocabulary_size", "sequence_length")
_OF_EXPERTS = ("top_k", "expert_width", "expert_gated", "shared_experts", "capacity_factor")
_PLACES = {"experts_every": 1, "dense_blocks": 0}  # of experts among blocks, with the least value
_LEAST = {"experts": 2, "top_k": 1, "expert_width": 1, "shared_experts": 0}
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
    optional = ("name", "key_heads", "head_width", "mlp_width", *_WORDS, *_FLAGS, "experts", *_OF_EXPERTS, *_PLACES)
    entries = source.fields(_REQUIRED, optional)
    others = ("name", "head_width", *_WORDS, *_FLAGS, "experts", *_OF_EXPERTS, *_PLACES)
    sizes = {name: entry.whole(least=1) for name, entry in entries.items() if name not in others}
    words = {name: _word(entries[name], known) for name, known in _WORDS.items() if name in entries}
    flags = {name: entries[name].flag() for name in _FLAGS if name in entries}
    name = entries["name"].text() if "name" in entries else "model"
    places = {name: entries[name].whole(least=least) for name, least in _PLACES.items() if name in entries}
    sizes = {"key_heads": sizes["heads"], "mlp_width": 4 * sizes["width"], **sizes}
    return Architecture(
        name=name,
        norm=cast("Literal['layer', 'rms']", words.get("norm", "layer")),
        positions=cast("Literal['rotary', 'learned']", words.get("positions", "rotary")),
        given_head_width=entries["head_width"].whole(least=1) if "head_width" in entries else None,
        experts=_experts(entries, sizes["mlp_width"], gated=flags.get("gated", False)),
        **cast("dict[str, Any]", sizes | flags | places),
    )


def _experts(entries: Mapping[str, Entry], mlp_width: int, *, gated: bool) -> ExpertSizes | None:
    """The experts of a model file. Raises InputError for a key of experts without experts, or without top_k."""
    if "experts" not in entries:
        for name in (*_OF_EXPERTS, *_PLACES):
            if name in entries:
                entries[name].refuse("has no effect without experts", "Add experts, or remove it")
        return None
    if "top_k" not in entries:
        entries["experts"].refuse("needs top_k, the experts per token", "Add it")
    whole = {name: entries[name].whole(least=least) for name, least in _LEAST.items() if name in entries}
    return ExpertSizes(
        experts=whole["experts"],
        top_k=whole["top_k"],
        expert_width=whole.get("expert_width", mlp_width),
        gated=entries["expert_gated"].flag() if "expert_gated" in entries else gated,
        shared=whole.get("shared_experts", 0),
        capacity_factor=entries["capacity_factor"].number(above=True) if "capacity_factor" in entries else None,
    )


def _word(entry: Entry, known: tuple[str, ...]) -> str:
    if entry.text() not in known:
        entry.refuse(f"must be {' or '.join(known)}")
    return entry.text()
