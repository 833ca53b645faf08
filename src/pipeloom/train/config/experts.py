"""Validates the options of expert parallelism. No torch."""

import math

from pipeloom.common.division import divisors
from pipeloom.errors import InputError, either
from pipeloom.ir import Schedule
from pipeloom.models.experts.settings import ROUTERS, ExpertSettings
from pipeloom.train.config.train_config import TrainConfig


def check_experts(config: TrainConfig, schedule: Schedule) -> None:
    """Validate that the router works as configured, and that the experts of the model can be shared.

    Raises:
        InputError: the first option that does not fit, with what would.
    """
    parallel, model = config.parallel, config.model
    if not model.experts:
        if parallel.expert > 1 and model.pretrained is not None:
            raise InputError(
                f"parallel.expert={parallel.expert}: does not work with model.pretrained. Remove parallel.expert."
            )
        if parallel.expert > 1:
            raise InputError(
                f"parallel.expert={parallel.expert}: model.experts=0: the model has no experts. Add --model.experts, "
                "or remove parallel.expert."
            )
        return
    _check_router(config, schedule)
    if parallel.tensor > 1:
        _check_tensor(config)
    if parallel.expert == 1:
        return
    if model.experts % parallel.expert:
        raise InputError(
            f"parallel.expert={parallel.expert}: must divide model.experts={model.experts}. Use "
            f"{either(divisors(model.experts))}."
        )
    _check_line(config)
    if parallel.expert_exchange == "capacity":
        settings = ExpertSettings.of(**config.gpt(vocabulary_size=1).expert_settings)
        if settings.capacity(1) is None:
            raise InputError(
                f"parallel.expert_exchange=capacity: the experts of model.router={model.router} have no capacity. Add "
                "--model.capacity_factor, or use counts."
            )


def _check_router(config: TrainConfig, schedule: Schedule) -> None:
    router, parallel = config.model.router, config.parallel
    if router == "expert-choice" and (parallel.slices is not None or schedule.num_slices > 1 or parallel.context > 1):
        parts = f"parallel.context={parallel.context}" if parallel.context > 1 else "sequence slices"
        raise InputError(
            f"model.router=expert-choice: does not work with {parts}: experts choose among all tokens of a sequence. "
            "Use another router, or whole sequences."
        )
    if ROUTERS[router].draws and config.num_threads > 1:
        raise InputError(
            f"model.router={router}: with --local and several ranks per stage, threads draw from one random generator. "
            "Use router topk, or remove --local."
        )


def _check_tensor(config: TrainConfig) -> None:
    parallel, width = config.parallel, config.gpt(vocabulary_size=1).width_of_expert
    if parallel.tensor_layout != "1d":
        raise InputError(
            f"parallel.tensor_layout={parallel.tensor_layout}: does not support layers of experts, and model.experts="
            f"{config.model.experts}. Use 1d."
        )
    if width % parallel.tensor:
        raise InputError(
            f"parallel.tensor={parallel.tensor}: must divide the width of an expert, {width}. Use another degree, or "
            "another model.expert_width."
        )


def _check_line(config: TrainConfig) -> None:
    """Validate that the degree divides the processes along its axes; ``parallel.data=-1`` is known later."""
    parallel = config.parallel
    names = parallel.expert_axes.split(",")
    degrees = {"data": parallel.data, "context": parallel.context}
    if -1 in (degrees[name] for name in names):
        return
    number = math.prod(degrees[name] for name in names)
    if number % parallel.expert:
        text = " x ".join(f"parallel.{name}={degrees[name]}" for name in names)
        fits = (
            f"{either(divisors(number))}, or other degrees"
            if number > 1
            else f"--parallel.{names[0]} {parallel.expert}"
        )
        raise InputError(
            f"parallel.expert={parallel.expert}: must divide the processes that share experts, {text}. Use {fits}."
        )
