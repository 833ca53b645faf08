"""Validates the options of a run that fine-tunes a model of a Hugging Face directory. No torch."""

from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeloom.errors import CheckpointError, InputError
from pipeloom.train.config.model_directory import ModelFacts, model_directory
from pipeloom.train.config.schedule import is_stream, schedule_name
from pipeloom.train.config.sections import ModelSizes
from pipeloom.train.config.train_config import TrainConfig

_TOLD = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"})  # not of its sizes


def check_fine_tuning(config: TrainConfig, facts: ModelFacts) -> None:
    """Validate that the options go with a model that has its own sizes.

    Raises:
        InputError: the first that does not, or a library that is missing.
    """
    model, given = config.model, f"model.pretrained={config.model.pretrained}"
    if find_spec("transformers") is None:
        raise InputError(f"{given}: transformers is not installed. Run pip install 'pipeloom[huggingface]'.")
    for entry in fields(ModelSizes):
        value = getattr(model, entry.name)
        if entry.name != "sequence_length" and value != entry.default:
            raise InputError(
                f"model.{entry.name}={value}: has no effect with {given}, whose model has its own sizes. Remove it."
            )
    if facts.positions is not None and model.sequence_length > facts.positions:
        raise InputError(
            f"model.sequence_length={model.sequence_length}: {given} has {facts.positions} positions. Use "
            f"{facts.positions} or less."
        )
    _check_parallel(config, given)
    if config.memory.cap is not None:
        raise InputError(
            f"memory.cap={config.memory.cap}: memory is predicted for pipeloom's GPT alone. Remove it, or use "
            "--memory.recompute."
        )
    if model.lora is not None:
        _check_lora(config)


def _check_parallel(config: TrainConfig, given: str) -> None:
    parallel, name = config.parallel, schedule_name(config)
    if is_stream(name):
        raise InputError(
            f"schedule={name}: does not work with {given}, whose loss is a mean over the tokens of a whole step. Use a "
            "synchronous schedule such as 1f1b."
        )
    refused = {
        "slices": (parallel.slices is not None, "whose batches are whole sequences"),
        "context": (parallel.context > 1, "whose batches are whole sequences"),
        "sequence": (parallel.sequence, "whose stages run the model's own forward"),
        "tensor_layout": (parallel.tensor_layout != "1d", "whose layers are shared with layout 1d alone"),
        "cut": (parallel.cut == "time", "which fits no single process that could measure it"),
    }
    for option, (wrong, why) in refused.items():
        if wrong:
            raise InputError(
                f"parallel.{option}={str(getattr(parallel, option)).lower()}: does not work with {given}, {why}. "
                "Remove it."
            )


def _check_lora(config: TrainConfig) -> None:
    if find_spec("peft") is None:
        raise InputError(f"model.lora={config.model.lora}: peft is not installed. Run pip install 'pipeloom[lora]'.")
    if config.parallel.tensor > 1:
        raise InputError(
            f"parallel.tensor={config.parallel.tensor}: does not work with model.lora, whose adapters are not shared. "
            "Remove one of them."
        )


def model_state(config: TrainConfig, adapters: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a checkpoint says about its model, as JSON; `adapters`: their configuration."""
    assert config.facts is not None
    home = str(model_directory(config.model.pretrained or ""))
    return {"pretrained": home, "config": dict(config.facts.content), "lora": config.model.lora, "adapters": adapters}


def check_same_model(config: TrainConfig, checkpoint: Path, saved: Mapping[str, Any]) -> None:
    """Validate that a run has the model of a checkpoint.

    Raises:
        CheckpointError: it has another one, or other adapters.
    """
    facts, before = config.facts, saved.get("pretrained")
    if facts is None or before is None:
        has = f"of {before}" if before is not None else "of a GPT"
        fix = f"Use --model.pretrained {before}" if before is not None else "Remove model.pretrained"
        raise CheckpointError(f"checkpoint {checkpoint} is {has}, and the run trains another model. {fix}.")
    for key, value in facts.content.items():
        if key not in _TOLD and saved["config"].get(key) != value:
            raise CheckpointError(
                f"model.pretrained={config.model.pretrained}: has {key}={value}, and checkpoint {checkpoint} "
                f"{saved['config'].get(key)}; both must be equal. Use --model.pretrained {before}."
            )
    if config.model.lora != saved.get("lora"):
        raise CheckpointError(
            f"model.lora={config.model.lora}: checkpoint {checkpoint} has {saved.get('lora')}; both must be equal. "
            "Change the option, or name another checkpoint."
        )
