"""What the configuration of a Hugging Face directory says about its model. Needs neither torch nor transformers."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from pipeloom.common.json_reader import parse_json
from pipeloom.errors import InputError

CONFIG_NAME = "config.json"
DEFAULT_LENGTH = 128
_PRETRAINED_LENGTH = 1024
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KEY_HEADS = ("num_key_value_heads",)


class ModelFacts(NamedTuple):
    """Facts about a model of transformers. None: its configuration does not say, or under an unknown name.

    Attributes:
        kind: its type, such as "llama".
        layers: number of blocks.
        positions: most tokens of a sequence.
        heads, kv_heads: attention heads, and heads of keys and values.
        vocabulary_size: token ids.
        content: the configuration.
    """

    kind: str
    layers: int | None
    positions: int | None
    heads: int | None
    kv_heads: int | None
    vocabulary_size: int | None
    content: Mapping[str, Any]


def model_directory(directory: str) -> Path:
    """The path of a directory as it was given."""
    return Path(directory).expanduser().absolute()


def model_facts(directory: str) -> ModelFacts:
    """The facts about the model of a directory.

    Raises:
        InputError: no such directory, or one without a configuration.
    """
    path = model_directory(directory) / CONFIG_NAME
    if not path.parent.is_dir():
        raise InputError(
            f"model.pretrained={directory}: is not a directory. Pass a directory of transformers, with {CONFIG_NAME}, "
            "safetensors files and a tokenizer. Nothing is downloaded."
        )
    try:
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no JSON object"
        raise InputError(
            f"model.pretrained={directory}: {CONFIG_NAME} cannot be read ({reason}). Pass a directory of transformers."
        ) from None


def default_length(directory: str) -> int:
    """The sequence length of a model where none is given: 1024, or its most positions if these are fewer."""
    try:
        return min(_PRETRAINED_LENGTH, model_facts(directory).positions or _PRETRAINED_LENGTH)
    except InputError:  # validation says so
        return _PRETRAINED_LENGTH


@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> ModelFacts:
    content = parse_json(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError
    inner = content.get("text_config")
    sizes = {**content, **inner} if isinstance(inner, dict) else content

    def number(names: tuple[str, ...]) -> int | None:
        return next((sizes[name] for name in names if isinstance(sizes.get(name), int) and sizes[name] > 0), None)

    return ModelFacts(
        kind=str(content.get("model_type", "")),
        layers=number(_LAYERS),
        positions=number(_POSITIONS),
        heads=number(_HEADS),
        kv_heads=number(_KEY_HEADS),
        vocabulary_size=number(("vocab_size",)),
        content=content,
    )
