"""The run of a plan: its configuration, with the rules that every run keeps. No torch."""

import re
from collections.abc import Mapping
from typing import Any

from pipeloom.errors import InputError, PipeloomError
from pipeloom.ir import Schedule
from pipeloom.parallel.mesh_shape import MeshShape
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import options_of_plan
from pipeloom.train.config.rules.settings import validate_settings
from pipeloom.train.config.train_config import TrainConfig


def planned_config(asked: TrainConfig, plan: Plan) -> TrainConfig:
    """The configuration with the options of a plan.

    A plan that holds the orders of a schedule is checked as one with split backwards: its file is not written yet.

    Raises:
        InputError, ScheduleError: `pipeloom train` cannot run it.
    """
    mapping = asked.to_mapping()
    options = options_of_plan(plan)
    if isinstance(plan.schedule, Schedule):
        options["schedule"] = "zb-h1" if plan.virtual_stages == 1 else "bfs"
    for key, value in options.items():
        section, _, name = key.rpartition(".")
        (mapping[section] if section else mapping)[name] = value
    config = TrainConfig.from_mapping(mapping)
    validate_settings(config)
    return config


def of_plan(path: str | None, error: InputError) -> InputError:
    """The error of a configuration, of its plan file if that sets the option which the error names.

    Args:
        path: of the plan; None: the configuration has none.
        error: of `validate_settings`; it begins with the option.
    """
    if path is None or str(error).partition("=")[0] not in options_of_plan(Plan.load(path)):
        return error
    rule = re.split(r"\. (?=[A-Z])", str(error))[0].rstrip(".")
    return InputError(
        f"plan {path} does not fit this run: {rule}. Change the run's other options, or use another plan."
    )


def check_mesh(plan: Plan) -> None:
    """Validate the mesh of a plan whose model is the caller's own. Raises InputError where there is none."""
    degrees: Mapping[str, Any] = {
        "pp": plan.num_ranks,
        "dp": plan.data,
        "cp": plan.context,
        "tp": plan.tensor,
    }
    MeshShape.of(degrees, order=plan.mesh_order, ep=plan.expert, expert_axes=plan.expert_mesh_axes)


def reason_of(error: PipeloomError) -> str:
    """The rule of an error without its values, to count errors by reason."""
    first = re.split(r"\. (?=[A-Z])", str(error))[0].rstrip(".")
    return re.sub(r"=[^\s:,;]+", "", first)
