"""What planning commands share: options of the model that they measure, and the command line that trains a plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import Namespace

from pipeloom.cli.common.parser import Parser
from pipeloom.cli.common.train_options import add_option
from pipeloom.errors import InputError
from pipeloom.models.gpt_config import GPTConfig
from pipeloom.plan.plan import Plan
from pipeloom.plan.train_options import options_of_plan
from pipeloom.train.config.option_list import options
from pipeloom.train.config.rules.streams import DRAINS, check_stream, steps_between_drains
from pipeloom.train.config.schedule import check_replicas, parse_cut
from pipeloom.train.config.sections import ModelSizes
from pipeloom.train.config.train_config import TrainConfig

_USUAL = {
    **dict.fromkeys((f"parallel.{name}" for name in ("chunks", "data", "tensor", "context", "expert")), 1),
    "parallel.tensor_layout": "1d",
    "parallel.sequence": False,
    "parallel.context_kind": "ring",
    "parallel.expert_axes": "data",
    "parallel.expert_exchange": "counts",
    "parallel.in_flight": "noam",
    "batch.microbatches": 1,
}


def add_model_options(parser: Parser, *, but: Sequence[str] = ()) -> None:
    """Add ``--model.*`` of `pipeloom train`, without the names in `but`; options that are not given are None."""
    group = parser.add_argument_group("model")
    for option in options(ModelSizes, "model"):
        if option.key.removeprefix("model.") not in but:
            add_option(group, option._replace(kind=option.kind | None, default=None))


def given_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes on the command line, by dotted name."""
    return {f"model.{name}": value for name, value in given["model"].items() if value is not None}


def measured_model(given: Mapping[str, Any], **sizes: Any) -> GPTConfig:
    """The GPT to measure: `sizes`, those on the command line, and the defaults of `pipeloom train`."""
    named = {name.removeprefix("model."): value for name, value in given_model(given).items()}
    return GPTConfig(**TrainConfig().gpt_sizes | named | sizes)


def check_file_alone(
    given: Mapping[str, Any], file: str, others: Sequence[str], content: str, *, sized: bool = False
) -> None:
    """Raise InputError if model sizes or options of `others` are given with option `file`, whose file has `content`.

    `sized`: sizes may be given, they are those of the model in the file.
    """
    given_too = [
        *(() if sized else given_model(given)),
        *(name for name in others if given[name.replace("-", "_")] is not None),
    ]
    if given_too:
        names = ", ".join(f"--{name}" for name in given_too)
        raise InputError(
            f"{names}: does not work with {file}, whose file has {content}. Remove {file}, or the other options."
        )


def train_command(chosen: Mapping[str, Any]) -> str:
    """``pipeloom train`` with options by dotted name."""
    words = (f"--{key} {str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items())
    return " ".join(["pipeloom train", *words])


def planned_options(plan: Plan) -> dict[str, Any]:
    """The options of `pipeloom train` that a plan sets, without those that have their usual value."""
    return {key: value for key, value in options_of_plan(plan).items() if value not in (None, _USUAL.get(key))}


def stream_command(plan: Plan, chosen: Mapping[str, Any], *, path: str | None = None) -> str:
    """``pipeloom train`` with a plan of a stream, and with steps at which the stream can drain.

    `chosen` are further options by dotted name, such as `model.layers`. With `path`, the file of the plan, ``--plan``
    replaces the options that the plan sets. Without a cut, the model gets at least one block per stage.

    Raises:
        InputError: `pipeloom train` cannot run these options; the message says why.
    """
    planned = planned_options(plan)
    default, model = TrainConfig(), {}
    if isinstance(plan.cut, tuple):
        model["model.layers"] = sum(map(int, plan.cut))
    elif plan.pipeline > default.model.layers:
        model["model.layers"] = plan.pipeline
    settled = planned | model | dict(chosen)
    config = _config(settled)
    check_replicas(config)
    each = steps_between_drains(config)
    steps = {key: -(-getattr(default, key) // each) * each for key in DRAINS if getattr(default, key) % each}
    config = _config(steps | settled)
    check_stream(config)
    parse_cut(config, plan.pipeline)
    first = planned if path is None else {"plan": path}
    more = {key: value for key, value in chosen.items() if path is None or key not in planned}
    return train_command({**first, **model, **steps, **more})


def _config(chosen: Mapping[str, Any]) -> TrainConfig:
    nested: Namespace = Namespace(**chosen)  # type: ignore[no-untyped-call]
    return TrainConfig.from_mapping(nested.as_dict())
