"""The files of adapters, as peft writes them. No torch."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeloom.common.tensor_file import TensorSource, write_bytes, write_tensors

_PREFIX = "base_model.model."  # peft's wrappers around a model, in the names of its files
_ADAPTER = ".default"  # the name of the only adapter, in those of a model


def adapter_names(names: Iterable[str]) -> dict[str, str]:
    """Name in a model -> name in peft's file, of the parameters of adapters."""
    return {name: _PREFIX + name.replace(_ADAPTER, "") for name in names if "lora_" in name}


def write_adapters(directory: Path, settings: Mapping[str, Any], tensors: Mapping[str, TensorSource]) -> None:
    """Write the files of adapters, as peft does.

    Args:
        directory: for the files; it exists.
        settings: their configuration.
        tensors: by name in the model.
    """
    names = adapter_names(tensors)
    write_tensors(directory / "adapter_model.safetensors", {names[name]: tensors[name] for name in names})
    write_bytes(directory / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True).encode())
