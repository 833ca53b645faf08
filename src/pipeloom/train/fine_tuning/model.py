"""The model of ``model.pretrained``, cut into stages, with adapters or without."""

import inspect
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM

from pipeloom.errors import InputError, SplitError
from pipeloom.ir import Schedule
from pipeloom.parallel.tensor.parallelize import parallelize
from pipeloom.pretrained import from_pretrained
from pipeloom.split import Stages, split
from pipeloom.train.config.fine_tuning import model_state
from pipeloom.train.config.model_directory import model_directory
from pipeloom.train.config.schedule import parse_cut
from pipeloom.train.config.train_config import TrainConfig
from pipeloom.train.fine_tuning.adapters import adapter_settings, add_adapters
from pipeloom.train.process_group import Group
from pipeloom.training.losses.own_loss import OwnLoss

_CAUSAL = ("ForCausalLM", "LMHeadModel")  # how classes of causal language models are named


class PretrainedModel(NamedTuple):
    """A model cut into stages; the pipeline reads its own ones.

    Attributes:
        stages: of the model.
        loss: that the model computes from labels.
        num_parameters: ``1,234 parameters``, and how many of them are trained.
        state: what checkpoints say about the model.
    """

    stages: Stages
    loss: OwnLoss
    num_parameters: str
    state: dict[str, Any]


def open_pretrained(config: TrainConfig, schedule: Schedule, group: Group) -> PretrainedModel:
    """The model of a run.

    Parameters are float32; ``precision`` says in what format they compute.

    Raises:
        InputError, CheckpointError: the directory has no causal language model, or one that cannot be cut this way.
    """
    home = model_directory(config.model.pretrained or "")
    model: Any = from_pretrained(home, AutoModelForCausalLM, "float32", device=group.device, seed=config.seed)
    _check_is_causal(config, type(model).__name__)
    if config.data.packing and "position_ids" not in inspect.signature(model.forward).parameters:
        raise InputError(
            f"data.packing=true: {type(model).__name__} takes no position_ids, which tell packed documents apart. "
            "Remove it."
        )
    if config.model.lora is not None:
        add_adapters(model, config, group.device)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    numbers = f"{sum(size for size, _ in sizes):,} parameters"
    if config.model.lora is not None:
        numbers += f", {sum(size for size, trains in sizes if trains):,} of them in adapters,"
    if group.mesh is not None and config.parallel.tensor > 1:
        parallelize(model, group.mesh, sequence=config.parallel.sequence)
    adapters = None if config.model.lora is None else adapter_settings(model)
    model.train()
    try:
        stages = split(model, schedule.num_stages, cut=parse_cut(config, schedule.num_stages))
    except SplitError as error:
        if "example=" not in str(error):
            raise
        raise SplitError(f"{error} Options cannot: train the model from Python, with pipeloom.Pipeline.") from error
    return PretrainedModel(stages, OwnLoss(model), numbers, model_state(config, adapters))


def _check_is_causal(config: TrainConfig, found: str) -> None:
    """Raises InputError for a directory of another kind of model, of which transformers would make one.

    Args:
        config: of the run.
        found: the class of the model that was made.
    """
    names = config.facts.content.get("architectures") if config.facts is not None else None
    kinds = [str(each) for each in names] if isinstance(names, list) else []
    if kinds and not any(each == found or each.endswith(_CAUSAL) for each in kinds):
        raise InputError(
            f"model.pretrained={config.model.pretrained}: holds a {kinds[0]}, of which a {found} would be another "
            "model. Pass the directory of a causal language model, or train the model from Python, with "
            "pipeloom.from_pretrained and pipeloom.Pipeline."
        )
