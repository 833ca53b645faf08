"""LoRA adapters (arXiv:2106.09685), which peft puts in place of a model's layers."""

import threading
from typing import Any

import torch
from torch import nn

from pipeloom.errors import InputError, one_line
from pipeloom.slicing.context import hashed
from pipeloom.train.config.model_directory import model_directory
from pipeloom.train.config.train_config import TrainConfig

_one_at_a_time = threading.Lock()  # torch's generator belongs to all threads


def add_adapters(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Put adapters into a model on the meta device, in place; its other parameters no longer require gradients.

    All processes make all adapters on `device`, with values from the seed.

    Raises:
        InputError: peft knows no targets for this kind of model, or the model has no such modules.
    """
    import peft
    from peft.tuners.lora import LoraLayer

    given = config.model
    targets = None if given.lora_targets is None else [name.strip() for name in given.lora_targets.split(",")]
    rank = given.lora or 0
    alpha: Any = 2 * rank if given.lora_alpha is None else given.lora_alpha  # peft says int, and takes any number
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules="all-linear" if targets == ["all-linear"] else targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(model_directory(given.pretrained or "")),
    )
    try:
        with _one_at_a_time, torch.random.fork_rng(devices=[]):
            peft.inject_adapter_in_model(settings, model)
            torch.manual_seed(hashed(config.seed, "adapters"))
            for layer in model.modules():
                if isinstance(layer, LoraLayer):
                    _initialize(layer, device)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"model.lora={rank}: peft puts no adapters into {type(model).__name__} ({one_line(error)}). Name modules "
            "with --model.lora_targets, such as q_proj,v_proj or all-linear."
        ) from error


def _initialize(layer: Any, device: torch.device) -> None:
    """Give an adapter its values, which peft leaves on the device of the layer around it."""
    parts = [part for name, part in layer.named_children() if name.startswith("lora_")]
    for part in parts:
        part.to_empty(device="cpu")
    layer.reset_lora_parameters("default", init_lora_weights=True)
    for part in parts:
        part.to(device)


def adapter_settings(model: Any) -> dict[str, Any]:
    """The configuration of the adapters in a model, as peft writes it."""
    settings = {**model.peft_config["default"].to_dict(), "inference_mode": True}
    return {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
